"""The certificate for HTTPS: the operator's, or one made at the first start and renewed by itself. Blocking code."""

import ipaddress
import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from synvirt.durable import put_private_file
from synvirt.errors import BadRequest
from synvirt.settings import Settings
from synvirt.settings.starting import check_pair, given_certificate

# Browsers refuse longer ones (CA/Browser Forum, Ballot SC22). In the last month a new one is made.
VALID_DAYS = 397
RENEW_DAYS = 30

log = structlog.get_logger(__name__)


def certificate(settings: Settings) -> tuple[Path, Path]:
    """The paths of certificate and key. They are made now, if the settings name none and there are none valid for another
    month."""
    try:
        given = given_certificate(settings)
    except PermissionError as error:
        raise BadRequest(
            f"the TLS file {error.filename} cannot be read: {error.strerror}", hint="the service's user must be able to read it"
        ) from error
    if given is not None:
        return given
    made = _own(settings)
    if not _still_good(*made):
        _make(*made)
    return made


def renew(settings: Settings) -> None:
    """Makes the service's own certificate again once it is in the last month of its validity, or was made by a clock that was
    ahead. One that is not whole is left alone, as somebody may be replacing it. OSError."""
    if settings.tls_certificate is None and settings.tls_key is None and _is_due((made := _own(settings))[0]):
        _make(*made)


def fingerprint(path: Path) -> str:
    """SHA-256 of the certificate, in the form of browsers and `openssl x509 -fingerprint`."""
    return x509.load_pem_x509_certificate(path.read_bytes()).fingerprint(hashes.SHA256()).hex(":").upper()


class Replaced:
    """Finds out that the files of the certificate and its key were replaced while the service runs, as certbot does."""

    def __init__(self, path: Path, key: Path) -> None:
        self._path, self._key = path, key
        self._used = self._refused = self._files()

    def look(self) -> bool:
        """Whether there is another usable pair than the one in use. One that is not usable is logged once."""
        found = self._files()
        if found in (self._used, self._refused):
            return False
        try:
            check_pair(self._path, self._key)
        except (BadRequest, OSError) as error:
            cause = error.detail if isinstance(error, BadRequest) else error.strerror
            log.warning("the new certificate cannot be used, and the old one stays", path=str(self._path), cause=cause)
            self._refused = found
            return False
        return True

    def use(self, context: ssl.SSLContext, ciphers: str) -> None:
        """Gives it to all connections that begin from now on. `context` stays the listening one: it would offer both
        certificates, if their keys are of different kinds."""
        found = self._files()
        fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        fresh.load_cert_chain(self._path, self._key)
        fresh.set_ciphers(ciphers)

        def renewed(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = fresh

        context.sni_callback = renewed  # called for each connection, whether it names a server or not
        self._used = found
        log.info("certificate", path=str(self._path), sha256=fingerprint(self._path))

    def _files(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_state_of(path) for path in (self._path, self._key))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - of what a link leads to, as certbot keeps them
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _own(settings: Settings) -> tuple[Path, Path]:
    return settings.keyring_dir / "tls.crt", settings.keyring_dir / "tls.key"


def _still_good(path: Path, key: Path) -> bool:
    if not (path.exists() and key.exists()):
        return False
    try:
        due = _is_due(path)
        check_pair(path, key)
    except (ValueError, BadRequest):
        return False  # incomplete after a full disk, or not of each other: made again
    return not due


def _is_due(path: Path) -> bool:
    """Whether a new one is to be made: this one ends soon, or is not valid yet. ValueError, if the file is no certificate;
    OSError."""
    found, now = x509.load_pem_x509_certificate(path.read_bytes()), datetime.now(UTC)
    return found.not_valid_before_utc > now or found.not_valid_after_utc <= now + timedelta(days=RENEW_DAYS)


def _make(path: Path, key_path: Path) -> None:
    """RFC 5280, self-signed, not an authority: trusting it means trusting this host and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    host = socket.gethostname()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64] or "synvirt")])
    # A host's own name may be invalid in DNS (an underscore, a space): then there is only localhost.
    hosts = dict.fromkeys(["localhost", *([host] if host.isascii() and host else [])])
    addresses = [ipaddress.ip_address(text) for text in ("127.0.0.1", "::1")]
    start = datetime.now(UTC) - timedelta(days=1)  # clocks differ
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=VALID_DAYS))
        .add_extension(
            x509.SubjectAlternativeName([*map(x509.DNSName, hosts), *map(x509.IPAddress, addresses)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem_key = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    put_private_file(key_path, pem_key)
    put_private_file(path, built.public_bytes(serialization.Encoding.PEM))
