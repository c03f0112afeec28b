"""Commands about who is let in: token, agents, user, ca, and join for a person's own commands."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

import typer
from fedeval.wire.credentials import joined_path, write
from fedeval.wire.gate import user_name
from fedeval.wire.invitation import Invitation
from fedeval.wire.joining import join as join_coordinator

from coordinator.admin import administer
from coordinator.commands.common import ADDRESS, Address, AsJson, console, print_json, say, table
from coordinator.live import duration
from eval_kernel.errors import ConfigError, DirectoryUnusable

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

token = typer.Typer(help="Make join strings for nodes.", no_args_is_help=True)
agents = typer.Typer(help="List who has joined; revoke certificates.", no_args_is_help=True)
user = typer.Typer(help="Give people API tokens, and take them back.", no_args_is_help=True)
ca = typer.Typer(help="Exchange the certificate authority while everything runs.", no_args_is_help=True)


@token.command()
def create(
    site: Annotated[str, typer.Option(help="The site that the node belongs to.")],
    role: Annotated[
        list[str] | None,
        typer.Option(help="forward, preprocess, aggregate (repeat for more; default: forward, preprocess); or client."),
    ] = None,
    valid: Annotated[str, typer.Option("--for", metavar="TIME", help="How long it is good: 90s, 15m, 1h, 2d.")] = "1h",
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="For the role aggregate: how its site calls it (repeat for more)."),
    ] = None,
    address: Address = ADDRESS,
) -> None:
    """Print a join string: good once, for one node, which runs `eval-agent join` with it."""
    roles, hosts, seconds = tuple(role or ("forward", "preprocess")), tuple(host or ()), _seconds(valid)
    say(administer(address, lambda client: client.create_token(site, roles, hosts, seconds)))


@agents.command("list")
def list_agents(as_json: AsJson = False, address: Address = ADDRESS) -> None:
    """List who was given a certificate."""
    members = administer(address, lambda client: client.members())
    if as_json:
        print_json([member.to_json() for member in members])
        return
    rows = table("name", "site", "roles", "certificate", "CA", right=("CA",))
    for member in members:
        left = member.expires_seconds
        standing = "revoked" if member.revoked else f"for {duration(left)}" if left > 0 else "expired"
        rows.add_row(member.name, member.site, ", ".join(member.roles), standing, str(member.root))
    console().print(rows)


@agents.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The agent's name.")],
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    address: Address = ADDRESS,
) -> None:
    """Refuse every certificate that NAME has been given: its calls and streams end at once."""
    count = administer(address, lambda client: client.revoke(name, reason))
    say(f"{name}: {count} certificate{'s' * (count != 1)} revoked")


@user.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    role: Annotated[str, typer.Option(help="viewer, submitter, operator or admin.")],
    address: Address = ADDRESS,
) -> None:
    """Print a new user's API token, once. It goes into FEDEVAL_TOKEN, or ~/.config/fedeval/token with mode 0600."""
    say(administer(address, lambda client: client.add_user(name, role)))


@user.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME")], address: Address = ADDRESS) -> None:
    """Forget a user: its token is good for nothing from now on."""
    administer(address, lambda client: client.remove_user(name))
    say(f"{name}: removed")


@user.command("list")
def list_users(as_json: AsJson = False, address: Address = ADDRESS) -> None:
    """List the users and their roles."""
    users = administer(address, lambda client: client.users())
    if as_json:
        print_json([{"name": name, "role": role} for name, role in users])
        return
    rows = table("user", "role")
    for name, role in users:
        rows.add_row(name, role)
    console().print(rows)


@ca.command()
def rotate(address: Address = ADDRESS) -> None:
    """Make a second CA: it signs from now on, both are trusted, agents renew by themselves."""
    pins = administer(address, lambda client: client.rotate_ca())
    say("\n".join(f"sha256:{pin}" for pin in pins))


@ca.command()
def retire(
    force: Annotated[bool, typer.Option("--force", help="Also cut off those who know the older CA only.")] = False,
    address: Address = ADDRESS,
) -> None:
    """End the trust in the older CA, once everybody has renewed. Join strings made before are void then."""
    say(f"sha256:{administer(address, lambda client: client.retire_ca(force=force))}")


def join(
    invitation: Annotated[str, typer.Argument(metavar="STRING", help="From `token create --role client`.")],
    name: Annotated[str | None, typer.Option(help="Your name there.", show_default="your user name")] = None,
) -> None:
    """Join a coordinator on another machine as a person: commands here then reach it, with your API token."""
    parsed = Invitation.parse(invitation)
    if not parsed.client:
        raise ConfigError("this join string is for a node: use it there with `eval-agent join`")
    membership = asyncio.run(join_coordinator(parsed, name or user_name()))
    path = joined_path(membership.address)
    try:
        write(path, membership.to_json())
    except OSError as error:
        raise DirectoryUnusable(f"cannot write {path} ({error.strerror}); the join string is used up") from None
    say(f"joined {membership.coordinator}; use --coordinator {membership.address}, or set FEDEVAL_COORDINATOR")


def _seconds(text: str) -> float:
    """Return a duration in seconds; raises ``ConfigError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"--for {text}: a duration is wanted, such as 90s, 15m, 1h or 2d")
    return float(found[1]) * _UNITS[found[2]]
