"""TLS with a platform: trusted by this host's authorities, or pinned by the certificate's SHA-256. Blocking code.

Appliances sign their own certificates: the first one seen is shown to the operator, who pins it; from then on any other is
refused, whoever signed it.
"""

import hashlib
import socket
import ssl
from dataclasses import dataclass

from synvirt.errors import SourceUnreachable
from synvirt.model import SourceOptions

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Shown:
    """The certificate that a platform showed. `refused`: why this host does not trust it; None: it does."""

    fingerprint: str
    refused: str | None


def fingerprint(der: bytes) -> str:
    """SHA-256 as browsers and `openssl x509 -fingerprint` show it."""
    return hashlib.sha256(der).digest().hex(":").upper()


def context(options: SourceOptions) -> ssl.SSLContext:
    """For a connection whose certificate `check_pinned` looks at next: with a pin, the pin decides, and not who signed."""
    made = ssl.create_default_context()
    if options.fingerprint_sha256 is not None or not options.verify_tls:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    return made


def check_pinned(sock: ssl.SSLSocket, options: SourceOptions, where: str) -> None:
    """Call it after the handshake and before a secret is sent. SourceUnreachable when the certificate is another."""
    if options.fingerprint_sha256 is None:
        return
    shown = fingerprint(sock.getpeercert(binary_form=True) or b"")
    if shown != options.fingerprint_sha256:
        raise certificate_changed(where, shown, options.fingerprint_sha256)


def certificate_changed(where: str, shown: str, pinned: str) -> SourceUnreachable:
    return SourceUnreachable(
        f"the certificate of {where} is not the pinned one: it has SHA-256 {shown}, pinned is {pinned}",
        hint="somebody may be in between; if the platform was given a new certificate, pin that one",
    )


def not_trusted(where: str, reason: str) -> SourceUnreachable:
    return SourceUnreachable(
        f"the certificate of {where} is not trusted: {reason}",
        hint="test the source: it shows the fingerprint, which you may pin as options.fingerprint_sha256",
    )


def look(host: str, port: int) -> Shown:
    """The certificate that is shown at this address. OSError where nobody listens or it is not TLS."""
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain,
        unverified.wrap_socket(plain, server_hostname=host) as sock,
    ):
        shown = fingerprint(sock.getpeercert(binary_form=True) or b"")
    try:
        with (
            socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain,
            ssl.create_default_context().wrap_socket(plain, server_hostname=host),
        ):
            return Shown(shown, None)
    except ssl.SSLCertVerificationError as error:
        return Shown(shown, error.verify_message)
