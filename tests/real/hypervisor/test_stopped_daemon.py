"""A libvirtd that is stopped, as by SIGSTOP: nobody waits for it without end, and once it goes on it is asked again."""

import os
import signal

import pytest

from synvirt.errors import DomainDefineFailed
from synvirt.kvm import connection as connection_module
from synvirt.kvm.connection import Connection, load
from tests.servers.libvirt_lab import lab


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_daemon_that_is_stopped_is_given_up_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KEEPALIVE_EVERY_S", 1)
    monkeypatch.setattr(connection_module, "OPEN_TIMEOUT_S", 1)
    with lab() as host:
        connection = Connection(f"qemu+unix:///system?socket={host.socket}", lambda: None)
        assert connection.use().listAllDomains() == []
        daemon = int((host.folder / "pid").read_text())
        os.kill(daemon, signal.SIGSTOP)
        try:
            with pytest.raises(load().libvirtError, match="keepalive"):
                connection.use().listAllDomains()
            with pytest.raises(DomainDefineFailed, match="does not answer"):
                connection.use()
        finally:
            os.kill(daemon, signal.SIGCONT)
        monkeypatch.setattr(connection_module, "AGAIN_S", 60)
        assert connection.use().listAllDomains() == []
        connection.close()
