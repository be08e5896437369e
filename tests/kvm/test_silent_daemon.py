"""This host's libvirtd takes the connection and says nothing, as one that was stopped: by a Unix socket that nobody reads."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.errors import DomainDefineFailed
from synvirt.kvm import connection as connection_module
from synvirt.kvm.connection import Connection
from tests.needs import need_libvirt


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    need_libvirt()
    with tempfile.TemporaryDirectory(prefix="sv-") as folder, socket.socket(socket.AF_UNIX) as one:
        one.bind(str(Path(folder) / "s"))
        one.listen()
        yield one


def test_a_silent_daemon_is_given_up_and_asked_only_once(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection_module, "AGAIN_S", 0.1)
    connection = Connection(f"qemu+unix:///system?socket={listening.getsockname()}", lambda: None)
    for _ in range(3):
        with pytest.raises(DomainDefineFailed, match="does not answer"):
            connection.use()
    listening.settimeout(30)
    taken, _ = listening.accept()
    listening.settimeout(0)
    with pytest.raises(BlockingIOError):
        listening.accept()
    # It ends: the next caller hears what became of the connection, and the one after that opens another.
    taken.close()
    monkeypatch.setattr(connection_module, "AGAIN_S", 30)
    with pytest.raises(DomainDefineFailed, match="cannot be opened"):
        connection.use()
    with pytest.raises(DomainDefineFailed, match="does not answer"):
        connection.use()
    connection.close()
    listening.settimeout(30)
    listening.accept()[0].close()
