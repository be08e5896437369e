"""What a stranger's certificate says of itself, put into words."""

import os
import select
import socket
import ssl
import struct
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


def test_only_who_asks_this_hosts_authorities_loads_them() -> None:
    """25 ms of a core for each context: most appliances are pinned."""
    pinned = tls.context("kvm7", verify=True, fingerprint_sha256="00:11")
    unchecked = tls.context("kvm7", verify=False, fingerprint_sha256=None)
    by_thumbprint = tls.context_by_thumbprint("esx1", "00:11")
    for context in (pinned, unchecked, by_thumbprint):
        assert context.cert_store_stats()["x509"] == 0
        assert not context.check_hostname
    checked, usual = tls.context("kvm7", verify=True, fingerprint_sha256=None), ssl.create_default_context()
    assert checked.cert_store_stats() == usual.cert_store_stats()
    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    # What is not about trust is as usual: versions, ciphers, options.
    for context in (pinned, unchecked, by_thumbprint):
        assert (context.minimum_version, context.options) == (usual.minimum_version, usual.options)
        assert context.get_ciphers() == usual.get_ciphers()


@pytest.mark.parametrize("pin", [None, "00:11"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_connection_that_is_reset_before_the_handshake_leaves_no_socket(pin: str | None, verify: bool) -> None:
    context = tls.context("kvm7", verify=verify, fingerprint_sha256=pin)
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        select.select([plain], [], [], 60)
        number = plain.fileno()
        with pytest.raises(ConnectionResetError):
            context.wrap_socket(plain, server_hostname="kvm7")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
