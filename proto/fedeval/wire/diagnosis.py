"""Why a connection does not come about, in words: what gRPC calls UNAVAILABLE is looked at again with plain sockets.

Every function here blocks, for a few ``SECONDS`` at most; nothing secret is sent.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from typing import Any

from cryptography import x509

from eval_kernel.errors import CaMismatch, CertificateExpired, FedevalError, PlainText, Revoked, Unreachable
from fedeval.wire.credentials import Credentials
from fedeval.wire.pki import Certificate, date, pin_of

#: What connecting and each answer may take.
SECONDS = 3.0
_AGAIN_SECONDS = 0.5
#: How a client of HTTP/2 begins: the preface and empty settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
#: OpenSSL's names of what an alert of the other side means.
_EXPIRED, _UNKNOWN = (
    "CERTIFICATE_EXPIRED",
    ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_REVOKED", "CERTIFICATE_UNKNOWN"),
)
_HOSTNAME_CODES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_EXPIRED_CODE, _NOT_YET_CODE = 10, 9


def own_certificate(credentials: Credentials) -> FedevalError | None:
    """Return what is wrong with the certificate that one would show, by the clock of this machine."""
    if not credentials.certificate:
        return None
    try:
        certificate = Certificate.parse(credentials.certificate)
    except ValueError as error:
        return CaMismatch(f"this node's certificate cannot be read ({error}); join again")
    now = time.time()
    if certificate.expires <= now:
        return CertificateExpired(
            f"this node's certificate expired on {date(certificate.expires)} (its clock shows {date(now)}); "
            "join again with a new join string"
        )
    if certificate.begins > now:
        return CertificateExpired(
            f"this node's certificate is valid from {date(certificate.begins)} on, and its clock shows {date(now)}; "
            "set the clock"
        )
    return None


def diagnose(address: str, credentials: Credentials) -> FedevalError | None:
    """Return why calls to ``host:port`` with these credentials cannot work, ``None`` if that may heal by itself."""
    if (wrong := own_certificate(credentials)) is not None:
        return wrong
    try:
        if not credentials.ca:
            return _plain(address)
        for pause in (_AGAIN_SECONDS, 0.0):
            with _connect(address) as plain:
                wrong = _tls(plain, address, credentials)
            if not isinstance(wrong, Revoked):
                return wrong
            time.sleep(pause)  # one that just stops looks the same, but not twice
        return wrong
    except OSError:
        return None  # nobody there, or not now


def _plain(address: str) -> FedevalError | None:
    with _connect(address) as connection:
        connection.sendall(_HELLO)
        if connection.recv(1):
            return None  # it answers plain text with something
    try:
        chain(address)
    except FedevalError:
        return None
    return PlainText(
        f"the coordinator at {address} speaks TLS, and this side plain text; join it first, with the join string that "
        "`eval-coordinator token create` prints there"
    )


def _tls(plain: socket.socket, address: str, credentials: Credentials) -> FedevalError | None:
    with tempfile.NamedTemporaryFile(mode="wb") as pair:  # made with mode 0600, gone at once
        context = ssl.create_default_context(cadata=credentials.ca.decode())
        context.set_alpn_protocols(["h2"])
        if credentials.certificate:
            pair.write(credentials.key + credentials.certificate)
            pair.flush()
            context.load_cert_chain(pair.name)
        try:
            with context.wrap_socket(plain, server_hostname=_host(address)) as secure:
                secure.sendall(_HELLO)
                if not secure.recv(1):
                    return _shut_out(address)  # after the handshake, before a word: so do servers that refuse us
        except ConnectionResetError:
            return _shut_out(address)
        except ssl.SSLCertVerificationError as error:
            return _server_refused(error, address, credentials)
        except ssl.SSLError as error:
            return _refused(error, address)
    return None


def _server_refused(error: ssl.SSLCertVerificationError, address: str, credentials: Credentials) -> FedevalError:
    """The other side's certificate was not good enough for us."""
    if error.verify_code in (_EXPIRED_CODE, _NOT_YET_CODE):
        return CertificateExpired(
            f"the certificate of the coordinator at {address} {_validity(address)}, and this node's clock shows "
            f"{date(time.time())}; set the clock, or start the coordinator again"
        )
    if error.verify_code in _HOSTNAME_CODES:
        return CaMismatch(
            f"the coordinator's certificate does not name {_host(address)}; start it with --advertise "
            f"{_host(address)}, or call it by one of its names"
        )
    pins = ", ".join(pin_of(root)[:16] for root in x509.load_pem_x509_certificates(credentials.ca))
    return CaMismatch(
        f"the CA of the coordinator at {address} is not the one that was joined ({pins}...): it was made anew, or "
        "somebody is in between; if it was made anew, join again with a new join string"
    )


def _refused(error: ssl.SSLError, address: str) -> FedevalError | None:
    """The handshake failed in another way."""
    reason = str(error.reason or "")
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason or "HTTP_REQUEST" in reason:
        return PlainText(
            f"the coordinator at {address} speaks plain text, and this side TLS; start the coordinator with "
            "--listen HOST:PORT of an address that others can reach, or remove this node's membership"
        )
    if _EXPIRED in reason:
        return CertificateExpired(
            f"the coordinator at {address} says that this node's certificate has expired: the clocks differ, or it "
            f"did ({date(time.time())} here); set the clock, or join again"
        )
    if any(word in reason for word in _UNKNOWN):
        return _shut_out(address)
    return None


def _shut_out(address: str) -> Revoked:
    return Revoked(
        f"the coordinator at {address} does not accept this node's certificate: its CA was retired or made anew; "
        "join again with a new join string"
    )


def chain(address: str) -> list[x509.Certificate]:
    """Return the certificates that whoever listens at ``host:port`` shows, its own first; nothing is verified.

    Raises ``Unreachable``, ``PlainText``.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the caller compares with a pin
    context.set_alpn_protocols(["h2"])
    try:
        with _connect(address) as plain, context.wrap_socket(plain, server_hostname=_host(address)) as secure:
            return [x509.load_der_x509_certificate(der) for der in _shown(secure)]
    except ssl.SSLError as error:
        wrong = _refused(error, address)
        if isinstance(wrong, PlainText):
            raise wrong from None
        raise Unreachable(f"no TLS connection to {address} ({error.reason or error})") from None
    except OSError as error:
        raise Unreachable(
            f"nobody answers at {address} ({error.strerror or error}); is `eval-coordinator serve` running there, and "
            "does a firewall let its enrolment port through?"
        ) from None


def _shown(secure: ssl.SSLSocket) -> list[bytes]:
    """Return the chain in DER: public since Python 3.13, and before that a method of the wrapped object."""
    public: Any = getattr(secure, "get_unverified_chain", None)
    if public is not None:
        return list(public())
    inner: Any = secure._sslobj  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in inner.get_unverified_chain()]


def _validity(address: str) -> str:
    try:
        certificate = chain(address)[0]
    except FedevalError:
        return "has expired or is not valid yet"
    expires, begins = certificate.not_valid_after_utc.timestamp(), certificate.not_valid_before_utc.timestamp()
    return f"expired on {date(expires)}" if expires <= time.time() else f"is valid from {date(begins)} on"


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS)
    connection.settimeout(SECONDS)
    return connection


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
