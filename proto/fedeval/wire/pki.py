"""Keys, certificate requests and what a certificate says of its owner: what both sides must agree on. Opens nothing.

An owner is named by one URI, ``fedeval://SITE/NAME``, among the alternative names; what it may be is in the
subject's organisational units: forward, preprocess, aggregate (an agent's roles), client (a person's commands) or
local (the user who runs the coordinator).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SCHEME = "fedeval"
#: What an agent may be, and what else a certificate may be for.
AGENT_ROLES = frozenset({"forward", "preprocess", "aggregate"})
RELAY_ROLE, CLIENT_ROLE, LOCAL_ROLE = "aggregate", "client", "local"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_URI = re.compile(rf"{SCHEME}://({NAME.pattern})/({NAME.pattern})")

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose certificate it is."""

    site: str
    name: str

    @property
    def uri(self) -> str:
        """The alternative name."""
        return f"{SCHEME}://{self.site}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Owner:
        """Return the owner that a URI names. Raises ``ValueError``."""
        found = _URI.fullmatch(uri)
        if found is None:
            raise ValueError(f"{uri[:200]!r} is not {SCHEME}://SITE/NAME")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.site}/{self.name}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says: its owner, what that one may be, and for how long (seconds since the epoch)."""

    owner: Owner
    roles: frozenset[str]
    serial: str
    begins: float
    expires: float

    @classmethod
    def parse(cls, pem: bytes) -> Certificate:
        """Read a PEM certificate that somebody has verified. Raises ``ValueError`` where it is none of ours."""
        certificate = x509.load_pem_x509_certificate(pem)
        return cls(
            _owner(certificate.extensions),
            frozenset(_units(certificate.subject)),
            f"{certificate.serial_number:x}",
            certificate.not_valid_before_utc.timestamp(),
            certificate.not_valid_after_utc.timestamp(),
        )

    @property
    def is_agent(self) -> bool:
        """Whether it is an agent's."""
        return bool(self.roles & AGENT_ROLES)


def date(moment: float) -> str:
    """Return a moment as people write it."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def new_key() -> Key:
    """Make a private key: EC P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """Return a private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes) -> Key:
    """Return the private key in a PEM block. Raises ``ValueError``."""
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an EC key")
    return key


def pin_of(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Return the SHA-256 of the public key (SPKI) in hexadecimal."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest()


def bundle_digest(ca: bytes) -> str:
    """Return what names a bundle of roots, whatever their order."""
    pins = sorted(pin_of(certificate) for certificate in x509.load_pem_x509_certificates(ca))
    return hashlib.sha256(" ".join(pins).encode()).hexdigest()


def host_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Return hosts as alternative names: addresses as such, all else as DNS names. Raises ``ValueError``."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def make_request(key: Key, owner: Owner, hosts: Iterable[str] = ()) -> bytes:
    """Return a certificate request (DER): ``owner`` asks, and will answer under ``hosts`` if it is a relay."""
    names = [x509.UniformResourceIdentifier(owner.uri), *host_names(hosts)]
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, owner.name[:64])]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )


@dataclass(frozen=True, slots=True)
class Request:
    """A certificate request that is sound: its key is of the right kind, and whoever made it has it."""

    csr: x509.CertificateSigningRequest
    owner: Owner
    hosts: tuple[str, ...]
    pin: str


def read_request(data: bytes) -> Request:
    """Read and check a certificate request (DER). Raises ``ValueError``."""
    if len(data) > 1 << 14:
        raise ValueError(f"{len(data)} bytes are too many")
    csr = x509.load_der_x509_csr(data)
    key = csr.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not EC P-256")
    if not csr.is_signature_valid:
        raise ValueError("its signature is wrong")
    names = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    ]
    return Request(csr, _owner(csr.extensions), tuple(hosts), pin_of(csr))


def _owner(extensions: x509.Extensions) -> Owner:
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("it names no owner") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError(f"it names {len(uris)} owners instead of one")
    return Owner.parse(uris[0])


def _units(subject: x509.Name) -> list[str]:
    return [str(unit.value) for unit in subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
