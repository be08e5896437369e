"""The signature of an OVF package (`.cert`, DSP0243 clause 5.1): the manifest's digest signed, and the signer's certificate.

SHA256(appliance.mf)= 5a0e…        the signature, in hexadecimal digits, over all bytes of the manifest
-----BEGIN CERTIFICATE-----        the signer's first, then perhaps its issuers'

It is verified that the holder of that certificate's key signed exactly this manifest. It is not known whether the signer can be
trusted: authorities of appliances are in no host's list, and there is no time of signing. So the reader is shown the name.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

from synvirt.errors import MalformedArchive
from synvirt.machines.texts import clean

# A chain of certificates has about 10 KiB.
SIGNATURE_MAX_BYTES = 256 << 10
# An RSA key of 16384 bits signs with 4096 digits; a longer one would let an attacker keep a processor busy.
_DIGITS_MAX = 4096

_LINE = re.compile(rb"^\s*([A-Za-z0-9-]{2,12})\s*\((.{1,1000})\)\s*=\s*([0-9a-fA-F]+)\s*$", re.MULTILINE)
_HASHES: dict[str, type[hashes.HashAlgorithm]] = {
    "sha1": hashes.SHA1,
    "sha256": hashes.SHA256,
    "sha384": hashes.SHA384,
    "sha512": hashes.SHA512,
}
# The errors of `cryptography` for damaged certificates and unknown kinds of keys.
_UNREADABLE = (ValueError, TypeError, IndexError, OverflowError, UnsupportedAlgorithm, x509.InvalidVersion)


@dataclass(frozen=True, slots=True)
class Signature:
    """`fits`: the key of this certificate signed this manifest."""

    fits: bool
    signer: str
    issuer: str
    fingerprint_sha256: str
    not_before: datetime
    not_after: datetime


def check(data: bytes, manifest: bytes, name: str) -> Signature:
    """`data` is the content of the .cert file `name`. MalformedArchive says why it cannot be checked."""
    if len(data) > SIGNATURE_MAX_BYTES:
        raise MalformedArchive(f"{name} has {len(data)} bytes; a signature has {SIGNATURE_MAX_BYTES} at most")
    line = _LINE.search(data)
    if line is None:
        raise MalformedArchive(f"{name} has no line «SHA256(…)= digits»")
    named, digits = line[1].decode().lower().replace("sha2-", "sha").replace("-", ""), line[3].decode()
    algorithm = _HASHES.get(named)
    if algorithm is None or len(digits) % 2 or len(digits) > _DIGITS_MAX:
        raise MalformedArchive(f"{name}: {named} with {len(digits)} digits is not a signature that is known")
    try:
        certificate = x509.load_pem_x509_certificates(data[data.find(b"-----BEGIN CERTIFICATE") :])[0]
        return Signature(
            fits=_fits(certificate, bytes.fromhex(digits), manifest, algorithm(), name),
            signer=clean(certificate.subject.rfc4514_string()) or "nobody",
            issuer=clean(certificate.issuer.rfc4514_string()) or "nobody",
            fingerprint_sha256=certificate.fingerprint(hashes.SHA256()).hex(),
            not_before=certificate.not_valid_before_utc.astimezone(UTC),
            not_after=certificate.not_valid_after_utc.astimezone(UTC),
        )
    except _UNREADABLE as problem:  # a certificate's parts are parsed on access
        raise MalformedArchive(f"{name} has no certificate that can be read") from problem


def _fits(certificate: x509.Certificate, signature: bytes, manifest: bytes, algorithm: hashes.HashAlgorithm, name: str) -> bool:
    try:
        key = certificate.public_key()
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, manifest, padding.PKCS1v15(), algorithm)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, manifest, ec.ECDSA(algorithm))
        else:
            raise MalformedArchive(f"{name}: a key of type {type(key).__name__} signs no appliance")
    except InvalidSignature:
        return False
    return True
