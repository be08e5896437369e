"""TLS with a platform: trusted by this host's authorities, or pinned by the certificate's SHA-256. Blocking code.

Appliances sign their own certificates. The operator is shown the first one and pins it. From then on any other is refused, even
one that an authority signed.
"""

import hashlib
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509

from synvirt import outgoing
from synvirt.errors import SourceUnreachable

CONNECT_TIMEOUT_S = 10.0
# 20 bytes in hex, with colons.
SHA1_CHARS = 59
# The other side chose the names on a certificate: an operator reads no more of them than this.
_NAME_CHARS: Final = 200
# An operator's pin is SHA-256. vSphere names its hosts' certificates by SHA-1; another certificate of the same SHA-1 still
# cannot be made.
_DIGESTS = {"SHA-256": hashlib.sha256, "SHA-1": hashlib.sha1}


@dataclass(frozen=True, slots=True)
class Shown:
    """The certificate that a platform showed. `refused`: why this host does not trust it; None: it does. `words`: its subject,
    its issuer and its end date."""

    fingerprint: str
    refused: str | None
    words: str = ""
    der: bytes = field(default=b"", repr=False)

    @property
    def pem(self) -> str:
        return ssl.DER_cert_to_PEM_cert(self.der)


def fingerprint(der: bytes, digest: str = "SHA-256") -> str:
    """SHA-256 as browsers and `openssl x509 -fingerprint` show it; or another."""
    return _DIGESTS[digest](der).digest().hex(":").upper()


def context(where: str, *, verify: bool, fingerprint_sha256: str | None) -> ssl.SSLContext:
    """For connections to `where`. With a pin, the pin decides, and not the issuer. It is compared at the end of each handshake,
    before anything is sent, whichever library holds the connection. SourceUnreachable, when the certificate is another."""
    if fingerprint_sha256 is None and verify:
        made = ssl.create_default_context()
    else:
        # Without this host's authorities, which are asked about nothing here: to load them takes 25 ms of a core.
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    made.sslsocket_class = _Socket if fingerprint_sha256 is None else _pinned_to(fingerprint_sha256, where, "SHA-256")
    return made


def context_by_thumbprint(where: str, thumbprint: str) -> ssl.SSLContext:
    """For connections to a host whose certificate a checked server has named by its SHA-1 or SHA-256 in hex."""
    pinned = thumbprint.replace(":", "").upper()
    pinned = ":".join(pinned[at : at + 2] for at in range(0, len(pinned), 2))
    made = context(where, verify=False, fingerprint_sha256=None)
    made.sslsocket_class = _pinned_to(pinned, where, "SHA-256" if len(pinned) > SHA1_CHARS else "SHA-1")
    return made


class _Socket(ssl.SSLSocket):
    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Where the peer has reset the connection before the handshake, `wrap_socket` (Python 3.11) looks for early data, and
        leaves this socket open if that fails. Nobody else has it by then: it closes itself."""
        try:
            return super().recv(buflen, flags)
        except OSError:
            if self.version() is None:
                self.close()
            raise


def _pinned_to(pinned: str, where: str, digest: str) -> type[ssl.SSLSocket]:
    class PinnedSocket(_Socket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            shown = fingerprint(self.getpeercert(binary_form=True) or b"", digest)
            if shown != pinned:
                self.close()
                raise certificate_changed(where, shown, pinned, digest)

    return PinnedSocket


def certificate_changed(where: str, shown: str, pinned: str, digest: str = "SHA-256") -> SourceUnreachable:
    """The error of a certificate that is not the pinned one."""
    return SourceUnreachable(
        f"the certificate of {where} is not the pinned one: it has {digest} {shown}, pinned is {pinned}",
        hint="an attacker may be in between; if the platform was given a new certificate, pin that one",
    )


def not_trusted(where: str, reason: str) -> SourceUnreachable:
    """The error of a certificate that no authority of this host signed, or outside its time."""
    pin = "test the source: it shows the fingerprint, which you may pin as options.fingerprint_sha256"
    hint = outgoing.hint_of_refused(reason, pin)
    return SourceUnreachable(f"the certificate of {where} is not trusted: {reason}", hint=hint)


def shown_certificate(host: str, port: int, trust: ssl.SSLContext) -> bytes:
    """The certificate (DER) at this address, if `trust` accepts it. OSError; BadRequest (outgoing.py)."""
    with (
        outgoing.sources().dial(host, port, timeout_s=CONNECT_TIMEOUT_S) as plain,
        trust.wrap_socket(plain, server_hostname=host) as sock,
    ):
        return sock.getpeercert(binary_form=True) or b""


def look(host: str, port: int) -> Shown:
    """The certificate at this address. OSError, where no server listens or it is not TLS; BadRequest: the guard refuses it."""
    der = shown_certificate(host, port, context(host, verify=False, fingerprint_sha256=None))
    refused: str | None = None
    try:
        shown_certificate(host, port, context(host, verify=True, fingerprint_sha256=None))
    except ssl.SSLCertVerificationError as error:
        refused = error.verify_message
    return Shown(fingerprint(der), refused, _words(der), der)


def made_out_to(pem: str, name: str) -> bool:
    """Whether the certificate is for this name or address: in its alternative names, or in its common name if it has none."""
    try:
        read = x509.load_pem_x509_certificate(pem.encode())
        names = [
            one.value.lower()
            for one in read.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            if isinstance(one.value, str)
        ]
        with suppress(x509.ExtensionNotFound):
            also = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = [one.lower() for one in also.get_values_for_type(x509.DNSName)]
            names += [str(one) for one in also.get_values_for_type(x509.IPAddress)]
    except (ValueError, TypeError, x509.InvalidVersion):
        return False
    wanted = name.lower()
    # «*.pool.example» stands for one label.
    return any(one == wanted or (one.startswith("*.") and one[1:] == wanted[wanted.find(".") :]) for one in names)


def _words(der: bytes) -> str:
    """RFC 4514 names, as far as they can be read."""
    try:
        read = x509.load_der_x509_certificate(der)
        subject, issuer = _line(read.subject.rfc4514_string()), _line(read.issuer.rfc4514_string())
        until = read.not_valid_after_utc
    except (ValueError, TypeError, x509.InvalidVersion) as error:
        return f"a certificate that cannot be read: {_line(str(error))}"
    signer = "itself" if issuer == subject else issuer or "nobody"
    return f"of {subject or 'no subject'}, signed by {signer}, valid until {until:%Y-%m-%d}"


def _line(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text[:_NAME_CHARS])
