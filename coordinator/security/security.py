"""Who calls, and what certificates and tokens they are given: the authority, the store and the gate put together.

Its methods are what the services of ``coordinator.rpc`` answer with. Disk work is done in threads.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import grpc
import structlog
from fedeval.wire.access import ANONYMOUS, Principal, UserRole
from fedeval.wire.channel import dynamic_credentials
from fedeval.wire.credentials import Credentials
from fedeval.wire.gate import Context, Gate, LocalToken, expired, user_name
from fedeval.wire.invitation import Invitation
from fedeval.wire.pki import (
    AGENT_ROLES,
    CLIENT_ROLE,
    LOCAL_ROLE,
    NAME,
    RELAY_ROLE,
    Certificate,
    Owner,
    Request,
    host_names,
    read_request,
)

from coordinator.config import CERTIFICATE_LIFE
from coordinator.security.audit import AuditLog
from coordinator.security.authority import SERVER_LIFE, Authority, Issued
from coordinator.security.names import Names
from coordinator.security.store import Member, Store, Token, digest, revoked
from eval_kernel.errors import JoinRefused, NotPermitted, RequestInvalid, Unauthenticated

#: How long a person's certificate is good, whose commands do not renew it, and a join string at most.
CLIENT_LIFE = timedelta(days=90)
MAX_TOKEN_SECONDS = 30 * 86_400.0

_log = structlog.get_logger("coordinator.security")
_parse = lru_cache(maxsize=8192)(Certificate.parse)


class Security:
    """``names`` is ``None`` for a coordinator that serves its own machine in plain text: it has no CA then."""

    def __init__(self, directory: Path, names: Names | None, life: timedelta = CERTIFICATE_LIFE) -> None:
        """Open what is in the data directory. Raises ``DirectoryUnusable``, ``ConfigError``."""
        self.store = Store(directory)
        self.audit = AuditLog(directory)
        self.authority = None if names is None else Authority(directory / "ca")
        self._names = names
        self._life = life
        self._local = LocalToken()
        self._users = self.store.users()
        self._revoked = self.store.revoked()
        self._standing = {m.owner.name: (m.owner.site, m.revoked) for m in self.store.members()}
        self.enrolment_port = 0  # known once it listens
        self.on_trust: Callable[[], None] = lambda: None  # called when the trusted roots have changed
        self._server: tuple[tuple[int, ...], float, grpc.ServerCertificateConfiguration] | None = None
        self._mutex = threading.Lock()
        self._changing = asyncio.Lock()
        self.gate = Gate(self.authenticate, self.audit)
        self.enrolment_gate = Gate(lambda token, context: ANONYMOUS, self.audit)

    def close(self) -> None:
        """Close the files."""
        self.store.close()
        self.audit.close()

    # ------------------------------------------------------------ who calls

    def authenticate(self, token: str, context: Context) -> Principal:
        """Return who shows this token over this connection. Raises ``AccessError``."""
        certificate = self._certificate(context)
        local = self._local(token, context)
        if local.local and (self.authority is None or (certificate is not None and LOCAL_ROLE in certificate.roles)):
            return local
        if certificate is not None and LOCAL_ROLE in certificate.roles:
            certificate = None  # it is for the token that was published with it, and for nothing else
        user = self._users.get(digest(token)) if token else None
        if token and user is None:
            raise Unauthenticated("the token is unknown here, or its user was removed; ask the administrator for one")
        if user is not None:
            return Principal(user.name, user=user.role, certificate=certificate)
        return ANONYMOUS if certificate is None else Principal(certificate.owner.name, certificate=certificate)

    def _certificate(self, context: Context) -> Certificate | None:
        """Return what the connection's certificate says. Raises ``CertificateExpired``, ``Revoked``."""
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            return None
        try:
            certificate = _parse(bytes(next(iter(found))))
        except ValueError as error:
            raise Unauthenticated(f"the certificate is not one of this coordinator's: {error}") from None
        if certificate.expires <= time.time():
            raise expired(certificate)
        if certificate.serial in self._revoked:
            raise revoked(certificate.owner.name)
        return certificate

    def local_credentials(self) -> Credentials:
        """Return what the user who runs this coordinator shows on its own machine."""
        if self.authority is None:
            return Credentials(self._local.token)
        key, certificate = self.authority.for_local_user(Owner("local", _name(user_name())))
        return Credentials(self._local.token, self.authority.bundle, certificate, key)

    # ------------------------------------------------------------ TLS

    def service_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the service port: every caller needs a certificate."""
        return dynamic_credentials(self._configuration, ask=True)

    def enrolment_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the enrolment port: callers have no certificate yet."""
        return dynamic_credentials(self._configuration, ask=False)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return key, certificate and trusted roots of now; called by grpc's own threads for each handshake."""
        assert self.authority is not None
        assert self._names is not None
        with self._mutex:
            authority, now = self.authority, time.time()
            if self._server is None or self._server[0] != self._trust or self._server[1] < now:
                pair = authority.for_server(Owner("coordinator", "coordinator"), self._names.hosts)
                made = grpc.ssl_server_certificate_configuration([pair], authority.bundle)
                self._server = (self._trust, now + SERVER_LIFE.total_seconds() * 2 / 3, made)
            return self._server[2]

    @property
    def _trust(self) -> tuple[int, ...]:
        assert self.authority is not None
        return tuple(root.number for root in self.authority.roots)

    @property
    def pin(self) -> str:
        """SHA-256 of the public key of the CA that a join string names; "" without TLS."""
        return "" if self.authority is None else self.authority.serving.pin

    @property
    def trust(self) -> str:
        """What names the roots that are trusted; "" without TLS."""
        return "" if self.authority is None else self.authority.digest

    # ------------------------------------------------------------ joining

    async def create_token(
        self, site: str, roles: tuple[str, ...], hosts: tuple[str, ...], seconds: float, made_by: str
    ) -> Invitation:
        """Make a join string. Raises ``RequestInvalid``."""
        authority, names = self._tls()
        _check_grant(site, roles, hosts)
        if not 0 < seconds <= MAX_TOKEN_SECONDS:
            raise RequestInvalid(f"a join string is good for more than 0 and at most {MAX_TOKEN_SECONDS:.0f} seconds")
        secret = secrets.token_urlsafe(16)
        token = Token(site, roles, hosts, time.time() + seconds)
        await asyncio.to_thread(self.store.add_token, secret, token, made_by)
        return Invitation(
            names.addresses(self.enrolment_port), authority.serving.pin, secret, site, CLIENT_ROLE in roles, hosts
        )

    async def enrol(self, secret: str, data: bytes) -> tuple[bytes, tuple[str, ...], Owner]:
        """Exchange a join string's secret for a certificate; return it with its roles and owner.

        Raises ``JoinRefused``, ``RequestInvalid``.
        """
        authority, _ = self._tls()
        request = _read(data)
        token, earlier = await asyncio.to_thread(self.store.look_up, secret, request)
        if request.owner.site != token.site:
            raise JoinRefused(f"the join string is for another site than {request.owner.site}")
        if not set(request.hosts) <= set(token.hosts):
            raise JoinRefused(
                f"the join string does not allow the hosts {', '.join(sorted(set(request.hosts) - set(token.hosts)))}; "
                "name them with `eval-coordinator token create --host`"
            )
        if earlier is None:
            issued = authority.issue(request, token.roles, self._life_of(token.roles))
            earlier = await asyncio.to_thread(self.store.redeem, secret, request, token.roles, issued)
            self._standing[request.owner.name] = (token.site, False)
            _log.info("joined", name=request.owner.name, site=token.site, roles=", ".join(token.roles))
        return earlier, token.roles, request.owner

    async def renew(self, caller: Principal, data: bytes, agent_of_relay: bool = False) -> bytes:
        """Return a later certificate for a member. Raises ``NotPermitted``, ``RequestInvalid``, ``Revoked``.

        With ``agent_of_relay`` the caller is a relay, and asks for an agent of its own site.
        """
        authority, _ = self._tls()
        request = _read(data)
        certificate = caller.certificate
        assert certificate is not None, "looked at by the gate"
        allowed = request.owner.site == certificate.owner.site if agent_of_relay else request.owner == certificate.owner
        if not allowed:
            raise NotPermitted(f"{caller} asks for a certificate of {request.owner}")
        member = await asyncio.to_thread(self.store.member, request.owner.name)
        if member is None:
            raise NotPermitted(f"{request.owner} has no certificate that could be renewed; it has to join")
        issued: Issued = authority.issue(request, member.roles, self._life_of(member.roles))
        await asyncio.to_thread(self.store.renewed, request, member.roles, issued)
        return issued.pem

    # ------------------------------------------------------------ looking after

    def standing(self, name: str) -> tuple[str, bool] | None:
        """Return the site of a member and whether it was revoked; ``None`` for a name that never joined."""
        return self._standing.get(name)

    async def members(self) -> list[Member]:
        """Return who was given a certificate."""
        return await asyncio.to_thread(self.store.members)

    async def revoke(self, name: str, reason: str) -> int:
        """Refuse a name's certificates from now on, and end its calls; return how many were good."""
        serials = await asyncio.to_thread(self.store.revoke, name, reason)
        self._revoked.update(serials)
        self._standing[name] = (self._standing[name][0], True)
        self.gate.cut(serials, revoked(name))
        _log.warning("revoked", name=name, reason=reason, certificates=len(serials))
        return len(serials)

    async def rotate(self) -> list[str]:
        """Make a second root; return the pins of both."""
        authority, _ = self._tls()
        async with self._changing:
            await asyncio.to_thread(authority.rotate)
            self.on_trust()
        _log.warning("a second CA signs from now on", pins=[root.pin for root in authority.roots])
        return [root.pin for root in authority.roots]

    async def retire(self, *, force: bool) -> str:
        """End the trust in the older root; return the pin of the other. Raises ``RequestInvalid``."""
        authority, _ = self._tls()
        async with self._changing:
            old, now = authority.serving.number, time.time()
            left = [
                member.owner.name
                for member in await self.members()
                if member.root <= old and member.expires > now and not member.revoked
            ]
            if left and not force and len(authority.roots) > 1:
                raise RequestInvalid(
                    f"{len(left)} of those who have joined know the older CA only, and would have to join again: "
                    f"{', '.join(left[:20])}; wait until they have renewed, revoke them, or use --force"
                )
            await asyncio.to_thread(authority.retire)
            self.on_trust()
        _log.warning("the older CA is trusted no more", pin=authority.serving.pin)
        return authority.serving.pin

    async def add_user(self, name: str, role: str, made_by: str) -> str:
        """Make a user and return its API token. Raises ``RequestInvalid``."""
        if not NAME.fullmatch(name):
            raise RequestInvalid(f"the user {name[:100]!r} is not a name: 1 to 100 letters, digits, '.', '_' or '-'")
        if role.upper() not in UserRole.__members__:
            raise RequestInvalid(f"{role[:100]!r} is no role; use viewer, submitter, operator or admin")
        token = secrets.token_urlsafe(32)
        await asyncio.to_thread(self.store.add_user, name, UserRole[role.upper()], token, made_by)
        self._users = await asyncio.to_thread(self.store.users)
        return token

    async def remove_user(self, name: str) -> None:
        """Forget a user. Raises ``RequestInvalid``."""
        await asyncio.to_thread(self.store.remove_user, name)
        self._users = await asyncio.to_thread(self.store.users)

    def users(self) -> list[tuple[str, str]]:
        """Return the users' names and roles."""
        return sorted((user.name, user.role.name.lower()) for user in self._users.values())

    def _life_of(self, roles: tuple[str, ...]) -> timedelta:
        return CLIENT_LIFE if CLIENT_ROLE in roles else self._life

    def _tls(self) -> tuple[Authority, Names]:
        if self.authority is None or self._names is None:
            raise RequestInvalid(
                "this coordinator serves its own machine only, in plain text, and has no CA; start it with "
                "--listen HOST:PORT, an address that others can reach"
            )
        return self.authority, self._names


def _read(data: bytes) -> Request:
    try:
        return read_request(data)
    except ValueError as error:
        raise RequestInvalid(f"the certificate request is wrong: {error}") from None


def _check_grant(site: str, roles: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """Raise ``RequestInvalid`` for a join string that makes no sense."""
    if not NAME.fullmatch(site):
        raise RequestInvalid(f"the site {site[:100]!r} is not a name: 1 to 100 letters, digits, '.', '_' or '-'")
    allowed = AGENT_ROLES if CLIENT_ROLE not in roles else {CLIENT_ROLE}
    if not roles or not set(roles) <= allowed:
        raise RequestInvalid(
            f"the roles are {', '.join(roles)[:200] or 'missing'}; use forward, preprocess, aggregate, or client alone"
        )
    if hosts and RELAY_ROLE not in roles:
        raise RequestInvalid("--host is for the role aggregate: nobody else is called")
    try:
        host_names(hosts)
    except ValueError as error:
        raise RequestInvalid(f"--host: {error}") from None


def _name(text: str) -> str:
    return text if NAME.fullmatch(text) else "local"
