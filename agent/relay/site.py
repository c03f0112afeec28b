"""Who may call a relay, and over what: this user's agents on this machine, or the site's agents with certificates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import grpc
import grpc.aio
from fedeval.wire.access import ANONYMOUS, Principal
from fedeval.wire.channel import dynamic_credentials, is_loopback
from fedeval.wire.credentials import Credentials, FileSource
from fedeval.wire.gate import Context, LocalToken, expired
from fedeval.wire.pki import Certificate

from agent.membership import load
from eval_kernel.errors import ConfigError, NotPermitted, Unauthenticated

_parse = lru_cache(maxsize=4096)(Certificate.parse)


@lru_cache(maxsize=4)
def _configuration(shown: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(shown.key, shown.certificate + shown.ca)], shown.ca)


@dataclass(frozen=True, slots=True)
class Site:
    """``hosts``: under which this relay answers with a certificate; none: it listens in plain text, on this machine."""

    name: str
    hosts: tuple[str, ...]
    membership: FileSource | None
    local: LocalToken = field(default_factory=LocalToken)

    @classmethod
    def of(cls, listen: str, membership: Path | None) -> Site:
        """Return how a relay that listens on ``host:port`` serves. Raises ``ConfigError``."""
        joined = None if membership is None else load(membership)
        if joined is not None and membership is not None and joined.membership.hosts:
            return cls(joined.membership.owner.site, joined.membership.hosts, FileSource(membership))
        if not is_loopback(listen):
            raise ConfigError(
                f"a relay that listens on {listen} is called from other machines and needs a certificate for it: join "
                "with a join string from `eval-coordinator token create --role aggregate --host HOST`"
            )
        return cls("", (), None)

    @property
    def secure(self) -> bool:
        """Whether callers need a certificate."""
        return self.membership is not None

    @property
    def server_name(self) -> str:
        """What this relay's certificate names; "" in plain text."""
        return self.hosts[0] if self.hosts else ""

    @staticmethod
    def called(address: str) -> str:
        """Return the address under which the relay's own process calls it."""
        host, _, port = address.rpartition(":")
        return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Take the port; return its number. Raises ``RuntimeError`` where it is taken."""
        if self.membership is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, dynamic_credentials(self._configuration, ask=True))

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return what to show in a handshake: what was renewed takes effect with the next one."""
        assert self.membership is not None
        return _configuration(self.membership())

    def authenticate(self, token: str, context: Context) -> Principal:
        """Return who calls: see ``fedeval.wire.gate.Authenticator``."""
        if self.membership is None:
            return self.local(token, context)
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            return ANONYMOUS
        try:
            certificate = _parse(bytes(next(iter(found))))
        except ValueError as error:
            raise Unauthenticated(f"the certificate is not one of this relay's coordinator: {error}") from None
        if certificate.expires <= time.time():
            raise expired(certificate)
        if certificate.owner.site != self.name:
            raise NotPermitted(f"this relay is of site {self.name}, and {certificate.owner} is not")
        return Principal(certificate.owner.name, certificate=certificate)
