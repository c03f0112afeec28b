"""Joining a coordinator and renewing what that gave: the caller's half of ``enrolment.proto``. Touches no disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from cryptography.hazmat.primitives import serialization

from eval_kernel.errors import CaMismatch, ConfigError, FedevalError, Unreachable
from fedeval.v1 import enrolment_pb2, enrolment_pb2_grpc
from fedeval.wire.channel import client_options
from fedeval.wire.credentials import Credentials
from fedeval.wire.diagnosis import chain, diagnose
from fedeval.wire.invitation import Invitation
from fedeval.wire.pki import Certificate, Key, Owner, bundle_digest, key_pem, make_request, new_key, pin_of
from fedeval.wire.status import from_rpc

CALL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Membership:
    """What joining gave: who one is to which coordinator, and the certificate that proves it."""

    address: str  # of the service port
    coordinator: str
    owner: Owner
    roles: tuple[str, ...]
    hosts: tuple[str, ...]  # under which a relay answers its site
    credentials: Credentials

    def to_json(self) -> dict[str, Any]:
        """Return what its file holds: a file of credentials with more in it."""
        return {
            "address": self.address,
            "coordinator": self.coordinator,
            "site": self.owner.site,
            "name": self.owner.name,
            "roles": list(self.roles),
            "hosts": list(self.hosts),
            **self.credentials.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Membership:
        """Return what a file held. Raises ``ConfigError``."""
        try:
            made = cls(
                value["address"],
                value["coordinator"],
                Owner(value["site"], value["name"]),
                tuple(value["roles"]),
                tuple(value["hosts"]),
                Credentials.from_json(value),
            )
            Certificate.parse(made.credentials.certificate)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the membership of this node cannot be read ({type(error).__name__}: {error}); join again"
            ) from None
        return made

    @property
    def certificate(self) -> Certificate:
        """What the certificate says."""
        return Certificate.parse(self.credentials.certificate)

    @property
    def trust(self) -> str:
        """What names the roots that are trusted: see ``RenewResponse.trust``."""
        return bundle_digest(self.credentials.ca)


async def join(invitation: Invitation, name: str, key: Key | None = None) -> Membership:
    """Exchange a join string for a membership. The secret leaves this process only towards the CA of the join string.

    The addresses are tried in turn. Raises ``Unreachable``, ``CaMismatch``, ``PlainText``, ``JoinRefused``.
    """
    key = key or new_key()
    owner = Owner(invitation.site, name)
    missed: FedevalError | None = None
    for address in invitation.addresses:
        try:
            root = await asyncio.to_thread(_pinned, address, invitation.pin)
            return await _enrol(invitation, address, root, owner, key)
        except Unreachable as error:
            missed = error
    assert missed is not None, "an invitation has an address"
    raise missed


def _pinned(address: str, pin: str) -> bytes:
    """Return the CA behind an enrolment port (PEM) if it is the expected one. Raises ``CaMismatch``."""
    for certificate in chain(address):
        if pin_of(certificate) == pin:
            return certificate.public_bytes(serialization.Encoding.PEM)
    raise CaMismatch(
        f"the CA at {address} is not the one in the join string: somebody is in between, or the coordinator's CA was "
        "made anew since; nothing secret was sent. Ask for a new join string over a way that you trust"
    )


async def _enrol(invitation: Invitation, address: str, root: bytes, owner: Owner, key: Key) -> Membership:
    request = enrolment_pb2.EnrolRequest(secret=invitation.secret, request=make_request(key, owner, invitation.hosts))
    async with grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(root), options=client_options()
    ) as channel:
        stub: enrolment_pb2_grpc.EnrolmentServiceAsyncStub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        try:
            answer = await stub.Enrol(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error, address)
            if isinstance(failure, Unreachable):
                # The pinned root was shown; if the connection fails all the same, what stands before it is not its.
                found = await asyncio.to_thread(diagnose, address, Credentials(ca=root))
                failure = failure if found is None else found
            raise failure from None
    credentials = Credentials("", answer.ca.encode(), answer.certificate.encode(), key_pem(key))
    service = f"{address.rpartition(':')[0]}:{answer.port}"
    return Membership(service, answer.coordinator, owner, tuple(answer.roles), invitation.hosts, credentials)


async def renew(channel: grpc.aio.Channel, membership: Membership) -> Membership:
    """Exchange a membership's certificate for a later one with a new key. Raises what the coordinator names."""
    key = new_key()
    request = enrolment_pb2.RenewCertificateRequest(request=make_request(key, membership.owner, membership.hosts))
    stub: enrolment_pb2_grpc.CertificateServiceAsyncStub = enrolment_pb2_grpc.CertificateServiceStub(channel)
    try:
        answer = await stub.RenewCertificate(request, timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, membership.address) from None
    credentials = Credentials("", answer.ca.encode(), answer.certificate.encode(), key_pem(key))
    return replace(membership, credentials=credentials)
