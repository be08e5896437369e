"""The manifest of an OVF package (`.mf`, DSP0243 clause 5.1): one digest per file, in the spellings in use.

SHA1(appliance.ovf)= 3f2a…        ovftool, and the standard
SHA256 (appliance.ovf) = 3f2a…    VirtualBox, BSD's tools
SHA2-256(appliance.ovf)= 3f2a…    openssl 3
3f2a…  appliance.ovf              sha256sum
"""

import re
from typing import Literal, NamedTuple

from synvirt.errors import MalformedArchive

# A line is about 130 bytes, and an appliance in 100,000 chunks is the largest that is read.
MANIFEST_MAX_BYTES = 16 << 20

Algorithm = Literal["sha1", "sha256", "sha512"]

_HEX_DIGITS: dict[Algorithm, int] = {"sha1": 40, "sha256": 64, "sha512": 128}
_ALGORITHMS: dict[str, Algorithm] = {
    **dict.fromkeys(("sha1", "sha-1"), "sha1"),
    **dict.fromkeys(("sha256", "sha-256", "sha2-256"), "sha256"),
    **dict.fromkeys(("sha512", "sha-512", "sha2-512"), "sha512"),
}
# Names may hold brackets and spaces, so the last «)=» ends the name.
_TAGGED = re.compile(r"([A-Za-z0-9-]{2,12})\s*\((.+)\)\s*=\s*([0-9a-fA-F]+)")
_SUM = re.compile(r"([0-9a-fA-F]+) [ *](.+)")


class Digest(NamedTuple):
    """A digest of the manifest: the algorithm, and the value in hexadecimal digits."""

    algorithm: Algorithm
    hex: str


def parse(data: bytes, name: str) -> dict[str, Digest]:
    """The digest of each file by its name as written. MalformedArchive names the line."""
    if len(data) > MANIFEST_MAX_BYTES:
        raise MalformedArchive(f"{name} has {len(data)} bytes; a manifest has {MANIFEST_MAX_BYTES} at most")
    digests: dict[str, Digest] = {}
    for number, raw in enumerate(_text(data).splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        file, digest = _entry(line, f"{name}, line {number}")
        if digests.setdefault(file, digest) != digest:
            raise MalformedArchive(f"{name}, line {number}: {file!r} has another digest than in an earlier line")
    return digests


def _entry(line: str, where: str) -> tuple[str, Digest]:
    tagged, plain = _TAGGED.fullmatch(line), _SUM.fullmatch(line)
    if tagged is not None:
        named, file, digits = tagged.groups()
        algorithm = _ALGORITHMS.get(named.lower())
    elif plain is not None:
        digits, file = plain.groups()
        algorithm = next((known for known, length in _HEX_DIGITS.items() if length == len(digits)), None)
        named = f"of {len(digits)} digits"
    else:
        raise MalformedArchive(f"{where} is not a digest of a file: {line[:80]!r}")
    if algorithm is None:
        raise MalformedArchive(f"{where}: the digest {named} is none of SHA1, SHA256 and SHA512")
    if len(digits) != _HEX_DIGITS[algorithm]:
        raise MalformedArchive(f"{where}: {len(digits)} hexadecimal digits are not a {algorithm.upper()} digest")
    return file.strip(), Digest(algorithm, digits.lower())


def _text(data: bytes) -> str:
    """PowerShell writes a byte-order mark, or UTF-16 with one; old exporters Latin-1."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
