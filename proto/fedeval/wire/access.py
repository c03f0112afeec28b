"""Who may call what: one rule for each RPC of every service, in one table. What it lacks is refused to everybody."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, IntEnum

from eval_kernel.errors import NotPermitted, Unauthenticated


class UserRole(IntEnum):
    """What a person may do; each role may do what the ones before it may."""

    VIEWER = 1
    SUBMITTER = 2
    OPERATOR = 3
    ADMIN = 4


class Access(Enum):
    """Whom an RPC is for."""

    OPEN = "anybody who can connect"
    KNOWN = "any agent, relay or user"
    AGENT = "agents"
    RELAY = "relays"
    VIEWER = "users"
    SUBMITTER = "users with the role submitter"
    OPERATOR = "users with the role operator"
    ADMIN = "users with the role admin"


@dataclass(frozen=True, slots=True)
class Rule:
    """``audit`` names the fields of the request that the audit log shows; ``None``: the call is not worth a line."""

    access: Access
    audit: tuple[str, ...] | None = None


def _service(name: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"/{name}/{rpc}": rule for rpc, rule in rules.items()}


RULES: dict[str, Rule] = {
    **_service(
        "fedeval.v1.JobService",
        {
            "SubmitJob": Rule(Access.SUBMITTER, ("key",)),
            "GetJob": Rule(Access.VIEWER),
            "ListJobs": Rule(Access.VIEWER),
            "GetReport": Rule(Access.VIEWER),
            "CancelJob": Rule(Access.SUBMITTER, ("job", "reason")),
            "WatchJob": Rule(Access.VIEWER),
            "ListNodes": Rule(Access.VIEWER),
            "GetCoordinator": Rule(Access.KNOWN),
        },
    ),
    **_service(
        "fedeval.v1.AgentService",
        {
            "Register": Rule(Access.AGENT, ("agent", "site")),
            "Acquire": Rule(Access.AGENT),
            "Renew": Rule(Access.AGENT),
            "Report": Rule(Access.AGENT),
        },
    ),
    **_service("fedeval.v1.RelayService", {"Relay": Rule(Access.RELAY)}),
    **_service("fedeval.v1.PackService", {"Fetch": Rule(Access.AGENT)}),
    # Whether it serves, and what its messages look like: no secret, and asked by tools that know no token.
    **_service(
        "grpc.health.v1.Health",
        {"Check": Rule(Access.OPEN), "Watch": Rule(Access.OPEN)},
    ),
    **_service("grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": Rule(Access.OPEN)}),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls.

    ``local``: the user who runs this server, on its own machine; may act as any agent, relay or user.
    """

    name: str
    local: bool = False
    user: UserRole | None = None

    def check(self, rule: Rule, rpc: str) -> None:
        """Raise ``Unauthenticated`` or ``NotPermitted`` unless the rule lets this caller in."""
        access = rule.access
        if self.local or access is Access.OPEN:
            return
        if not self.known:
            raise Unauthenticated(UNKNOWN)
        if access is Access.KNOWN:
            return
        if access.name in UserRole.__members__ and self.user is not None and self.user >= UserRole[access.name]:
            return
        raise NotPermitted(f"{rpc.rpartition('/')[2]} is for {access.value}; {self} is not one")

    @property
    def known(self) -> bool:
        """Whether it has proved anything."""
        return self.local or self.user is not None

    def __str__(self) -> str:
        if self.local:
            return f"local user {self.name}"
        if self.user is not None:
            return f"user {self.name} ({self.user.name.lower()})"
        return "an unknown caller"


#: What a caller without credentials is told.
UNKNOWN = (
    "this coordinator knows no such token: call as the user who runs it, on its machine, or set FEDEVAL_TOKEN to a "
    "token that `eval-coordinator user add` has printed"
)
ANONYMOUS = Principal("")
#: Who makes the call that is being answered.
CALLER: ContextVar[Principal] = ContextVar("caller", default=ANONYMOUS)
