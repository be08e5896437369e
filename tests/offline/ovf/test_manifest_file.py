"""Manifests (.mf) in the spellings that are about."""

import hashlib

import pytest

from synvirt.errors import MalformedArchive
from synvirt.offline.ovf import manifest_file
from synvirt.offline.ovf.manifest_file import Digest

HEX = {name: hashlib.new(name, b"x").hexdigest() for name in ("sha1", "sha256", "sha512")}


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        (f"SHA1(a.ovf)= {HEX['sha1']}\n", "sha1"),  # ovftool
        (f"SHA256(a.ovf)= {HEX['sha256']}\r\n", "sha256"),  # ovftool on Windows
        (f"SHA512(a.ovf)= {HEX['sha512']}", "sha512"),  # no line end
        (f"SHA1 (a.ovf) = {HEX['sha1']}\n", "sha1"),  # VirtualBox
        (f"SHA256 (a.ovf) = {HEX['sha256'].upper()}\n", "sha256"),  # BSD's sha256 with capital digits
        (f"SHA2-256(a.ovf)= {HEX['sha256']}\n", "sha256"),  # openssl 3
        (f"sha-512(a.ovf)={HEX['sha512']}\n", "sha512"),
        (f"{HEX['sha1']}  a.ovf\n", "sha1"),  # sha1sum
        (f"{HEX['sha256']} *a.ovf\n", "sha256"),  # sha256sum --binary
        (f"\n# made by hand\n  SHA256(a.ovf)= {HEX['sha256']}  \n\n", "sha256"),
        (f"\ufeffSHA256(a.ovf)= {HEX['sha256']}\n", "sha256"),  # Notepad
    ],
)
def test_spellings(line: str, algorithm: str) -> None:
    assert manifest_file.parse(line.encode(), "a.mf") == {"a.ovf": Digest(algorithm, HEX[algorithm])}  # type: ignore[arg-type]


def test_powershell_writes_utf_16() -> None:
    text = f"SHA256(a.ovf)= {HEX['sha256']}\r\n".encode("utf-16")
    assert manifest_file.parse(text, "a.mf") == {"a.ovf": Digest("sha256", HEX["sha256"])}


@pytest.mark.parametrize("name", ["my vm (1).vmdk", "a)= b.vmdk", "ünïcode.vmdk", "sub/disk.vmdk", "a=b.vmdk"])
def test_odd_file_names(name: str) -> None:
    assert list(manifest_file.parse(f"SHA256({name})= {HEX['sha256']}\n".encode(), "a.mf")) == [name]


def test_latin_1_names() -> None:
    assert list(manifest_file.parse(f"SHA256(dïsk)= {HEX['sha256']}\n".encode("latin-1"), "a.mf")) == ["dïsk"]


def test_the_same_line_twice_is_once() -> None:
    assert len(manifest_file.parse(f"SHA1(a)= {HEX['sha1']}\n".encode() * 2, "a.mf")) == 1


def test_an_empty_manifest_names_nothing() -> None:
    assert manifest_file.parse(b"", "a.mf") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"SHA1(a)= {HEX['sha1']}\nSHA256(b)= {HEX['sha1']}", "a.mf, line 2: 40 hexadecimal digits are not a SHA256 digest"),
        (f"MD5(a)= {HEX['sha1'][:32]}", "a.mf, line 1: the digest MD5 is none of"),
        (f"{HEX['sha1'][:32]}  a", "the digest of 32 digits is none of"),
        ("what is this", "a.mf, line 1 is not a digest of a file: 'what is this'"),
        (f"SHA1(a)= {HEX['sha1']}\nSHA1(a)= {'0' * 40}", "line 2: 'a' has another digest than in an earlier line"),
    ],
)
def test_damage_is_named_by_its_line(text: str, says: str) -> None:
    with pytest.raises(MalformedArchive, match=says):
        manifest_file.parse(text.encode(), "a.mf")


def test_a_manifest_that_is_too_large() -> None:
    with pytest.raises(MalformedArchive, match="16777216 at most"):
        manifest_file.parse(b"\n" * (16 << 20) + b"\n", "a.mf")
