"""Who may call what: one rule for each RPC of every service, in one table. What it lacks is refused to everybody."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, IntEnum

from eval_kernel.errors import NotPermitted, Unauthenticated
from fedeval.wire.pki import RELAY_ROLE, Certificate


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
    MEMBER = "those who have joined, over TLS"
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
    **_service("fedeval.v1.CertificateService", {"RenewCertificate": Rule(Access.MEMBER, ())}),
    **_service(
        "fedeval.v1.AdminService",
        {
            "CreateToken": Rule(Access.OPERATOR, ("site", "roles", "hosts", "valid_seconds")),
            "ListAgents": Rule(Access.OPERATOR),
            "RevokeAgent": Rule(Access.OPERATOR, ("name", "reason")),
            "AddUser": Rule(Access.ADMIN, ("name", "role")),
            "RemoveUser": Rule(Access.ADMIN, ("name",)),
            "ListUsers": Rule(Access.ADMIN),
            "RotateCa": Rule(Access.ADMIN, ()),
            "RetireCa": Rule(Access.ADMIN, ("force",)),
        },
    ),
    # On a port of its own, which offers nothing else; what lets the caller in is the secret in the
    # request, and the service writes the audit line itself, since it knows who it was.
    **_service("fedeval.v1.EnrolmentService", {"Enrol": Rule(Access.OPEN)}),
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
    ``certificate``: whose connection it is. It alone says which agent calls, and its token alone which user.
    """

    name: str
    local: bool = False
    user: UserRole | None = None
    certificate: Certificate | None = None

    def check(self, rule: Rule, rpc: str) -> None:
        """Raise ``Unauthenticated`` or ``NotPermitted`` unless the rule lets this caller in."""
        access = rule.access
        if access is Access.OPEN:
            return
        if not self.known:
            raise Unauthenticated(UNKNOWN)
        match access:
            case Access.KNOWN:
                allowed = True
            case Access.MEMBER:
                allowed = self.certificate is not None and not self.local
            case Access.AGENT:
                allowed = self.local or (self.certificate is not None and self.certificate.is_agent)
            case Access.RELAY:
                allowed = self.local or (self.certificate is not None and RELAY_ROLE in self.certificate.roles)
            case _:
                allowed = self.local or (self.user is not None and self.user >= UserRole[access.name])
        if not allowed:
            raise NotPermitted(f"{rpc.rpartition('/')[2]} is for {access.value}; {self} is not one")

    def speaks_as(self, agent: str, site: str | None = None) -> None:
        """Raise ``NotPermitted`` unless this is that agent; the local user may be any."""
        if self.local or self.certificate is None:
            return
        owner = self.certificate.owner
        if agent != owner.name or site not in (None, owner.site):
            raise NotPermitted(f"agent {owner} speaks as {f'{site[:100]}/' if site else ''}{agent[:100]}")

    def may_be(self, roles: Iterable[str]) -> None:
        """Raise ``NotPermitted`` for an agent's roles that its certificate lacks."""
        if self.local or self.certificate is None:
            return
        more = set(roles) - self.certificate.roles
        if more:
            raise NotPermitted(f"{self} may not be {', '.join(sorted(more))}: its join string was for other roles")

    @property
    def known(self) -> bool:
        """Whether it has proved anything."""
        return self.local or self.user is not None or self.certificate is not None

    def __str__(self) -> str:
        if self.local:
            return f"local user {self.name}"
        if self.user is not None:
            return f"user {self.name} ({self.user.name.lower()})"
        if self.certificate is not None:
            return f"{'agent' if self.certificate.is_agent else 'client'} {self.certificate.owner}"
        return "an unknown caller"


#: What a caller without credentials is told.
UNKNOWN = (
    "this coordinator knows no such token: call as the user who runs it, on its machine, or set FEDEVAL_TOKEN to a "
    "token that `eval-coordinator user add` has printed; a node joins first, see `eval-agent join --help`"
)
ANONYMOUS = Principal("")
#: Who makes the call that is being answered.
CALLER: ContextVar[Principal] = ContextVar("caller", default=ANONYMOUS)
