"""What a stranger's certificate says of itself, put into words."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.transport import tls
from tests.cases import cases
from tests.needs import need


@pytest.fixture(scope="module")
def der(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("certificate")
    argv = [need("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    argv += [
        "-subj",
        "/CN=kvm7/O=Two\tlines\nof it",
        "-outform",
        "DER",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "der"),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return (folder / "der").read_bytes()


def test_a_certificate_says_whose_it_is_in_one_line(der: bytes) -> None:
    words = tls._words(der)
    assert words.startswith("of ")
    assert "CN=kvm7" in words
    assert "signed by itself, valid until 20" in words
    assert words.isprintable()


@cases(200)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3), cut=st.none() | st.integers(0, 10_000)
)
def test_a_damaged_certificate_is_put_into_words_too(der: bytes, changes: list[tuple[int, int]], cut: int | None) -> None:
    damaged = bytearray(der)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    words = tls._words(bytes(damaged[:cut]))
    assert words
    assert words.isprintable()
