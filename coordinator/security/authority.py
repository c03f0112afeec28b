"""The coordinator's own certificate authority: its roots on disk, and what they sign. Decides nothing about who asks.

There is one root, or two while they are being exchanged: then both are trusted, the newer one signs what agents get,
and the older one still signs the server's certificate, because agents that have not heard of the newer one trust no
other. ``retire`` ends that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fedeval.wire import pki
from fedeval.wire.credentials import private, sync_directory, write_private
from fedeval.wire.pki import Key, Owner, host_names, key_pem, new_key, pin_of

from eval_kernel.errors import DirectoryUnusable, RequestInvalid

#: A certificate begins a little before it is made, so that a clock that is slow does not refuse it.
BACKDATED = timedelta(hours=1)
ROOT_LIFE = timedelta(days=3650)
SERVER_LIFE = timedelta(days=30)

Public = x509.Certificate | x509.CertificateSigningRequest


@dataclass(frozen=True, slots=True)
class Root:
    """One root. Numbers ascend; ``pem`` is its certificate."""

    number: int
    key: Key
    certificate: x509.Certificate
    pem: bytes

    @property
    def pin(self) -> str:
        """SHA-256 of its public key."""
        return pin_of(self.certificate)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was signed. ``root`` is the number of the one that did."""

    pem: bytes
    serial: str
    expires: float
    root: int


class Authority:
    """The roots in one directory, which must be this coordinator's alone."""

    def __init__(self, directory: Path) -> None:
        """Read the roots; make the first one if there is none. Raises ``DirectoryUnusable``, ``ConfigError``."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._roots = [_load(path) for path in sorted(directory.glob("[0-9]*.pem"))]
            if not self._roots:
                self._roots = [self._make(1)]
        except OSError as error:
            raise DirectoryUnusable(
                f"cannot use {directory} ({error.strerror}), where the keys of the certificate authority are kept"
            ) from None

    @property
    def roots(self) -> tuple[Root, ...]:
        """The roots that are trusted, the oldest first."""
        return tuple(self._roots)

    @property
    def serving(self) -> Root:
        """The one that signs the server's certificate: every agent trusts it."""
        return self._roots[0]

    @property
    def issuing(self) -> Root:
        """The one that signs what agents get."""
        return self._roots[-1]

    @property
    def bundle(self) -> bytes:
        """The trusted roots, PEM."""
        return b"".join(root.pem for root in self._roots)

    @property
    def digest(self) -> str:
        """What names the bundle."""
        return pki.bundle_digest(self.bundle)

    def rotate(self) -> Root:
        """Add a root; it signs from now on. Raises ``RequestInvalid`` while two are trusted, ``OSError``."""
        if len(self._roots) > 1:
            raise RequestInvalid(
                "the CA is being exchanged already: end that with `eval-coordinator ca retire` before the next one"
            )
        root = self._make(self.issuing.number + 1)
        self._roots.append(root)
        return root

    def retire(self) -> Root:
        """Trust the newer root alone, and return the older one. Raises ``RequestInvalid`` where there is but one."""
        if len(self._roots) < 2:
            raise RequestInvalid("there is one CA only; `eval-coordinator ca rotate` makes the next one")
        old = self._roots[0]
        self._path(old.number).unlink(missing_ok=True)
        sync_directory(self._directory)  # it must not come back with a power cut
        self._roots.remove(old)
        return old

    def issue(self, request: pki.Request, roles: Iterable[str], life: timedelta) -> Issued:
        """Sign a request that somebody has judged, for these roles and the hosts that it names."""
        server = pki.RELAY_ROLE in roles
        return self._sign(self.issuing, request.csr, request.owner, roles, request.hosts, life, server=server)

    def for_server(self, owner: Owner, hosts: Iterable[str], life: timedelta = SERVER_LIFE) -> tuple[bytes, bytes]:
        """Make the server's key and certificate; return both, the certificate with its root behind it (PEM)."""
        key = new_key()
        csr = pki.read_request(pki.make_request(key, owner, hosts)).csr
        issued = self._sign(self.serving, csr, owner, (), hosts, life, server=True)
        return key_pem(key), issued.pem + self.serving.pem

    def for_local_user(self, owner: Owner) -> tuple[bytes, bytes]:
        """Make the key and certificate of the user who runs this coordinator, for its own machine (PEM)."""
        key = new_key()
        csr = pki.read_request(pki.make_request(key, owner)).csr
        issued = self._sign(self.issuing, csr, owner, (pki.LOCAL_ROLE,), (), ROOT_LIFE, server=False)
        return key_pem(key), issued.pem

    def _sign(
        self,
        root: Root,
        public: Public,
        owner: Owner,
        roles: Iterable[str],
        hosts: Iterable[str],
        life: timedelta,
        *,
        server: bool,
    ) -> Issued:
        now = datetime.now(UTC)
        ends = min(now + life, root.certificate.not_valid_after_utc)
        units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in sorted(roles)]
        names = [x509.UniformResourceIdentifier(owner.uri), *host_names(hosts)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if server else [])]
        serial = x509.random_serial_number()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, owner.name[:64]), *units]))
            .issuer_name(root.certificate.subject)
            .public_key(public.public_key())
            .serial_number(serial)
            .not_valid_before(now - BACKDATED)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.key.public_key()), critical=False)
            .sign(root.key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return Issued(pem, f"{serial:x}", ends.timestamp(), root.number)

    def _make(self, number: int) -> Root:
        key, now = new_key(), datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedeval CA {number} of {time.time_ns():x}")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + ROOT_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(ca=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        write_private(self._path(number), key_pem(key) + pem)
        return Root(number, key, certificate, pem)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.pem"


def _load(path: Path) -> Root:
    """Read key and certificate of a root. Raises ``DirectoryUnusable``, ``ConfigError``, ``OSError``."""
    private(path, path.stat().st_mode)
    data = path.read_bytes()
    try:
        key, certificate = pki.load_key(data), x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise DirectoryUnusable(
            f"{path} holds no key and certificate of a CA ({error}); put a copy back, or remove the file: then "
            "every agent has to join anew"
        ) from None
    return Root(int(path.stem), key, certificate, certificate.public_bytes(serialization.Encoding.PEM))


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
