"""A certificate that changes while the service runs: replaced by its operator, or the service's own, before it expires."""

import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from synvirt.api import tls
from tests.fakes.service import Service
from tests.running.processes import until

Served = tuple[tuple[str, int], Path, Path]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Its address, certificate and key."""
    monkeypatch.setattr("synvirt.api.server.CERTIFICATE_LOOK_S", 0.05)
    service = Service(tmp_path)
    with service.served() as server:
        host, port = server._sockets.tcp.getsockname()[:2]
        keyring = service.settings.keyring_dir
        yield (host, port), keyring / "tls.crt", keyring / "tls.key"
    service.close()


def test_one_that_is_replaced_is_used_without_a_restart(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address, path, key = served
    before = ssl.get_server_certificate(address)
    path.write_text("half of it")
    time.sleep(0.3)
    assert ssl.get_server_certificate(address) == before
    monkeypatch.setattr(ec, "generate_private_key", lambda _: rsa.generate_private_key(65537, 2048))
    tls._make(path, key)
    until(lambda: ssl.get_server_certificate(address) != before)
    assert ssl.get_server_certificate(address).strip() == path.read_text().strip()


def test_the_services_own_is_renewed_before_it_expires(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service runs for years: the certificate of its start expired after 397 days."""
    address, path, key = served
    with monkeypatch.context() as years_later:
        years_later.setattr(tls, "RENEW_DAYS", 0)  # until it is served
        years_later.setattr(tls, "VALID_DAYS", 20)
        tls._make(path, key)
        old = path.read_text()
        until(lambda: ssl.get_server_certificate(address) == old)
    until(lambda: ssl.get_server_certificate(address) != old)
    assert ssl.get_server_certificate(address) == path.read_text()
    assert not tls._is_due(path)


def test_the_services_own_of_a_clock_that_was_ahead_is_made_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not valid yet, so no client that trusts it connects, for years."""
    address, path, key = served
    ahead = datetime.now(UTC) + timedelta(days=3000)
    with monkeypatch.context() as first_start:
        first_start.setattr(tls, "datetime", SimpleNamespace(now=lambda _: ahead))
        tls._make(path, key)
        old = path.read_text()
    until(lambda: path.read_text() != old)
    until(lambda: ssl.get_server_certificate(address) == path.read_text())
    assert not tls._is_due(path)
