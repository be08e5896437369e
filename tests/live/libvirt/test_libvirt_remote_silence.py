"""A libvirt that takes the connection and says nothing, by a Unix socket that nobody reads: no job may hang on it."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.kvm.limit import begun, within
from synvirt.live import SourceAccess
from synvirt.live.libvirt import adapter as libvirt_remote
from synvirt.live.libvirt import host as libvirt_remote_host
from synvirt.live.libvirt.adapter import LibvirtRemote
from tests.needs import need_libvirt

ACCEPT_TIMEOUT_S = 60


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A socket that listens, in a folder with a path short enough for one."""
    need_libvirt()
    with tempfile.TemporaryDirectory(prefix="sv-") as folder, socket.socket(socket.AF_UNIX) as one:
        one.bind(str(Path(folder) / "s"))
        one.listen()
        one.settimeout(ACCEPT_TIMEOUT_S)
        yield one


def _adapter(listening: socket.socket) -> LibvirtRemote:
    return LibvirtRemote(SourceAccess(f"qemu:///system?socket={listening.getsockname()}", {}, {}))


def test_a_silent_host_is_given_up_and_its_session_closes(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libvirt_remote_host, "OPEN_TIMEOUT_S", 0.2)
    adapter = _adapter(listening)

    async def session() -> None:
        with pytest.raises(SourceUnreachable, match="does not answer within"):
            await adapter.connect()
        await adapter.close()

    asyncio.run(session())


_BESIDE_AN_EMBEDDED_DRIVER = """
import sys
from synvirt.errors import SourceUnreachable
from synvirt.kvm.library import load
from synvirt.live import SourceAccess
from synvirt.live.libvirt import host
from synvirt.live.libvirt.adapter import LibvirtRemote
import asyncio, os
embedded = load(SourceUnreachable).open("qemu:///embed?root=" + sys.argv[2])
host.OPEN_TIMEOUT_S = 0.2
try:
    asyncio.run(LibvirtRemote(SourceAccess("qemu:///system?socket=" + sys.argv[1], {}, {})).connect())
except SourceUnreachable as error:
    print(error.detail, flush=True)
os._exit(0)
"""


def test_it_is_asked_by_its_socket_in_a_process_that_has_an_embedded_driver(listening: socket.socket, tmp_path: Path) -> None:
    """As the service has: libvirt gave qemu:///system to that driver, which refused it."""
    argv = [sys.executable, "-c", _BESIDE_AN_EMBEDDED_DRIVER, listening.getsockname(), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert "does not answer within" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_session_closes_though_its_call_does_not_end(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr(libvirt_remote, "CLOSE_WAIT_S", 0.1)
    if not cancelled:
        monkeypatch.setattr(libvirt_remote, "ANSWER_TIMEOUT_S", 0.1)
    adapter = _adapter(listening)

    async def session() -> None:
        connecting = asyncio.create_task(adapter.connect())
        taken, _ = await asyncio.to_thread(listening.accept)
        with taken:
            if cancelled:
                connecting.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else SourceUnreachable):
                await connecting
            folder = adapter._host.folder
            await adapter.close()
            assert not folder.exists()
            with pytest.raises(SourceUnreachable, match="not open"):
                _ = adapter._host.connection

    asyncio.run(session())


def test_what_comes_too_late_is_handed_to_the_cleanup() -> None:
    go_on, cleared = threading.Event(), threading.Event()
    late: list[str] = []

    def slow() -> str:
        assert go_on.wait(30)
        return "connection"

    def unwanted(found: str) -> None:
        late.append(found)
        cleared.set()

    with pytest.raises(TimeoutError):
        within(0.01, slow, unwanted=unwanted)
    go_on.set()
    assert cleared.wait(30)
    assert late == ["connection"]


def test_a_call_within_its_limit_gives_its_result_or_its_error() -> None:
    assert within(30, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        within(30, _raises_its_own)
    assert begun(os.getpid).result(30) == os.getpid()


def _raises_its_own() -> None:
    raise TimeoutError("its own")
