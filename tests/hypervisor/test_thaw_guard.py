"""The guard on a connection to an agent that the test plays: libvirt's while the service lives, the guard's once it is gone."""

import select
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from synvirt.kvm import thaw_guard
from synvirt.kvm.freezing import GUARD

IMPATIENT = "import sys; from synvirt.kvm import thaw_guard; thaw_guard.HOLD_S = 0; sys.exit(thaw_guard.main())"
# A service that froze its guest, and is gone.
GONE = f"""
import subprocess, sys
guard = subprocess.Popen([sys.executable, "-P", {str(GUARD)!r}, "uri", "uuid", sys.argv[1]],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(int(sys.argv[1]),))
assert guard.stdout.readline() == b"ready\\n"
guard.stdin.write(b"hold\\n")
guard.stdin.flush()
"""
THAW, STATUS = '{"execute": "guest-fsfreeze-thaw"}\n', '{"execute": "guest-fsfreeze-status"}\n'


def test_while_the_service_lives_what_the_agent_answers_is_left_to_libvirt() -> None:
    agent, libvirt = socket.socketpair()
    argv = [sys.executable, "-c", IMPATIENT, "uri", "uuid", str(libvirt.fileno())]
    pipe = subprocess.PIPE
    with (
        agent,
        libvirt,
        agent.makefile() as commands,
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, pass_fds=(libvirt.fileno(),)) as guard,
    ):
        agent.settimeout(60)
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"ready\n"
        guard.stdin.write(b"hold\n")
        guard.stdin.flush()
        assert commands.readline() == THAW
        agent.sendall(b'{"return": "thawed"}\n')
        assert commands.readline() == THAW, "until the service says so"
        assert select.select([libvirt], [], [], 0)[0]
        assert libvirt.recv(100) == b'{"return": "thawed"}\n'
        guard.stdin.write(b"thawed\n")
        guard.stdin.flush()
        assert guard.wait(60) == 0


def test_once_the_service_is_gone_the_agent_itself_says_when_it_is_over() -> None:
    agent, libvirt = socket.socketpair()
    with agent, libvirt:
        agent.settimeout(60)
        subprocess.run(
            [sys.executable, "-c", GONE, str(libvirt.fileno())], pass_fds=(libvirt.fileno(),), check=True, timeout=60
        )
        libvirt.close()
        with agent.makefile() as commands:
            # Its pipe is closed a moment before it is gone.
            assert set(iter(commands.readline, STATUS)) == {THAW}
            agent.sendall(b'{"return": 1}\n{"return": "thawed"}\n')
            assert commands.readline() == "", "it is over, and the guard has ended"


def test_a_guest_is_thawed_by_a_new_connection_where_the_daemon_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an upgrade does, which restarts the service too."""

    class Lost(Exception):
        pass

    opened: list[str] = []

    def open_(uri: str) -> SimpleNamespace:
        opened.append(uri)
        number = len(opened)
        return SimpleNamespace(lookupByUUIDString=lambda _uuid: number)

    def ask(domain: int, _command: str, _timeout_s: int, _flags: int) -> str:
        if domain == 1:
            raise Lost("client socket is closed")
        return '{"return": "thawed"}'

    libvirt = SimpleNamespace(registerErrorHandler=lambda *_: None, open=open_, libvirtError=Lost)
    monkeypatch.setitem(sys.modules, "libvirt", libvirt)
    monkeypatch.setitem(sys.modules, "libvirt_qemu", SimpleNamespace(qemuAgentCommand=ask))
    thaw = thaw_guard.by_libvirt("qemu:///system", "uuid")
    with pytest.raises(Lost):
        thaw(True)
    assert thaw(True)
    assert opened == ["qemu:///system"] * 2
