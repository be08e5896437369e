"""Signed appliances: certificate and signature as ovftool and openssl write them."""

import contextlib
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import MalformedArchive
from synvirt.model.machine import Concern
from synvirt.offline.ovf import signature
from synvirt.offline.ovf.archive import OvaArchive
from tests.cases import cases
from tests.needs import need
from tests.offline import appliances

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
RSA_KEY = rsa.generate_private_key(65537, 2048)
MANIFEST = b"SHA256(a.ovf)= " + b"0" * 64 + b"\r\n"


def certificate(key: Key, name: str = "Example Appliances") -> bytes:
    called = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.COUNTRY_NAME, "NO")])
    start = datetime(2024, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder().subject_name(called).issuer_name(called).public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=365))
    made = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def signed(
    manifest: bytes, key: Key = RSA_KEY, algorithm: str = "SHA256", line: str = "{algorithm}({name})= {digits}\n"
) -> bytes:
    digest = {"SHA1": hashes.SHA1(), "SHA256": hashes.SHA256(), "SHA512": hashes.SHA512()}[algorithm.replace("SHA2-", "SHA")]
    if isinstance(key, rsa.RSAPrivateKey):
        raw = key.sign(manifest, padding.PKCS1v15(), digest)
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        raw = key.sign(manifest, ec.ECDSA(digest))
    else:
        raw = key.sign(manifest)
    return line.format(algorithm=algorithm, name="a.mf", digits=raw.hex()).encode() + certificate(key)


@pytest.mark.parametrize("algorithm", ["SHA1", "SHA256", "SHA512", "SHA2-256"])
@pytest.mark.parametrize("line", ["{algorithm}({name})= {digits}\n", "{algorithm} ({name}) = {digits}\r\n"])
def test_a_right_signature_says_who_signed(algorithm: str, line: str) -> None:
    found = signature.check(signed(MANIFEST, RSA_KEY, algorithm, line), MANIFEST, "a.cert")
    assert found.fits
    assert found.signer == "C=NO,CN=Example Appliances"
    assert (found.not_before.year, found.not_after.isoformat()[:10]) == (2024, "2024-12-31")


def test_a_key_on_an_elliptic_curve() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    assert signature.check(signed(MANIFEST, key), MANIFEST, "a.cert").fits


def test_the_certificate_may_come_with_those_of_its_authorities() -> None:
    others = certificate(rsa.generate_private_key(65537, 2048), "An authority")
    assert signature.check(signed(MANIFEST) + others, MANIFEST, "a.cert").signer == "C=NO,CN=Example Appliances"


def test_openssl_agrees(tmp_path: Path) -> None:
    """A signature that another tool made: `openssl dgst -sign`."""
    openssl = need("openssl", "openssl")
    key, mf = tmp_path / "key.pem", tmp_path / "a.mf"
    mf.write_bytes(MANIFEST)
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-subj", "/CN=me", "-days", "1"]
    made = subprocess.run([openssl, *new], check=True, capture_output=True, timeout=60).stdout
    sign = [openssl, "dgst", "-sha256", "-sign", str(key), "-hex", str(mf)]
    digits = subprocess.run(sign, check=True, capture_output=True, timeout=60).stdout.decode().split("= ")[1].strip()
    found = signature.check(f"SHA256(a.mf)= {digits}\n".encode() + made, MANIFEST, "a.cert")
    assert (found.fits, found.signer) == (True, "CN=me")


@pytest.mark.parametrize("change", ["manifest", "digits", "key"])
def test_a_wrong_signature_does_not_fit(change: str) -> None:
    data, manifest = signed(MANIFEST), MANIFEST
    if change == "manifest":
        manifest = MANIFEST.replace(b"a.ovf", b"b.ovf")
    elif change == "digits":
        at = data.index(b"= ") + 2
        data = data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]
    else:
        data = data[: data.index(b"-----BEGIN")] + certificate(rsa.generate_private_key(65537, 2048))
    assert not signature.check(data, manifest, "a.cert").fits


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has no line"),
        (certificate(RSA_KEY), "has no line"),
        (b"SHA256(a.mf)= 00\n", "no certificate that can be read"),
        (
            b"SHA256(a.mf)= 00\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "no certificate that can be read",
        ),
        (b"MD5(a.mf)= 00\n" + certificate(RSA_KEY), "md5 with 2 digits is not a signature that is known"),
        (b"SHA256(a.mf)= 000\n" + certificate(RSA_KEY), "3 digits"),
        (b"SHA256(a.mf)= " + b"0" * 5000 + b"\n" + certificate(RSA_KEY), "5000 digits"),
        (b"x" * (300 << 10), "262144 at most"),
        (signed(MANIFEST, ed25519.Ed25519PrivateKey.generate()), "Ed25519PublicKey signs no appliance"),
    ],
)
def test_what_cannot_be_checked_says_why(data: bytes, says: str) -> None:
    with pytest.raises(MalformedArchive, match=says):
        signature.check(data, MANIFEST, "a.cert")


WHOLE = signed(MANIFEST)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of a damaged certificate
@cases(200)
@given(at=st.integers(0, len(WHOLE) - 1), bits=st.integers(1, 255), length=st.integers(0, len(WHOLE)))
def test_no_damaged_signature_does_anything_else_than_not_fit(at: int, bits: int, length: int) -> None:
    damaged = (WHOLE[:at] + bytes([WHOLE[at] ^ bits]) + WHOLE[at + 1 :])[: max(length, 1)]
    with contextlib.suppress(MalformedArchive):
        signature.check(damaged, MANIFEST, "a.cert")


DER = ssl.PEM_cert_to_DER_cert(certificate(RSA_KEY).decode())


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of a damaged certificate
@cases(200)
@given(at=st.integers(0, len(DER) - 1), bits=st.integers(1, 255))
def test_no_damaged_certificate_does_either(at: int, bits: int) -> None:
    """Under its letters, where their code does not refuse it first."""
    damaged = DER[:at] + bytes([DER[at] ^ bits]) + DER[at + 1 :]
    data = WHOLE[: WHOLE.index(b"-----BEGIN")] + ssl.DER_cert_to_PEM_cert(damaged).encode()
    with contextlib.suppress(MalformedArchive):
        signature.check(data, MANIFEST, "a.cert")


# ── in a package ─────────────────────────────────────────────────────────────────────────────────────────────────────


def concerns_of(files: dict[str, bytes], folder: Path) -> dict[str, Concern]:
    path = appliances.archive(folder / "a.ova", files)
    return {concern.id: concern for concern in OvaArchive().inspect(path, folder).concerns}


@pytest.fixture
def files() -> dict[str, bytes]:
    return appliances.appliance("virtualbox")


def test_a_signed_appliance_names_its_signer(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.cert"] = signed(files["virtualbox.mf"])
    found = concerns_of(files, tmp_path)["signed"]
    assert found.category == "Information"
    assert "CN=Example Appliances" in found.assessment
    assert "2024-01-01 to 2024-12-31" in found.assessment
    sent = files["virtualbox.cert"]
    fingerprint = x509.load_pem_x509_certificate(sent[sent.index(b"-----") :]).fingerprint(hashes.SHA256()).hex()
    assert fingerprint in found.remedy


def test_a_signature_of_another_manifest_is_a_critical_concern(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.cert"] = signed(files["virtualbox.mf"] + b"\n")
    found = concerns_of(files, tmp_path)
    assert found["signature-wrong"].category == "Critical"
    assert "signed" not in found


def test_a_signature_without_a_manifest_cannot_be_checked(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.cert"] = signed(files.pop("virtualbox.mf"))
    found = concerns_of(files, tmp_path)["signature-not-checked"]
    assert found.category == "Warning"
    assert "no manifest" in found.assessment


def test_a_cert_that_is_none_cannot_be_checked(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.cert"] = b"-----BEGIN CERTIFICATE-----\n"
    assert "has no line" in concerns_of(files, tmp_path)["signature-not-checked"].assessment


def test_another_appliances_cert_beside_is_not_this_ones(files: dict[str, bytes], tmp_path: Path) -> None:
    found = concerns_of({**files, "x.cert": b"", "y.cert": b""}, tmp_path)
    assert not {"signed", "signature-wrong", "signature-not-checked"} & set(found)
