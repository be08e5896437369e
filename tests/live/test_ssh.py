"""Sockets that ssh makes here: by programs in its place that do late, or not at all, what it does at once."""

import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synvirt.errors import SourceUnreachable
from synvirt.live.ssh import Door, Tunnels

# Its socket is the part of `-L LOCAL:REMOTE` before the colon.
SSH = f"""#!{sys.executable} -IS
import socket, sys, time
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[sys.argv.index("-L") + 1].partition(":")[0])
"""
LATE = "time.sleep(0.5)\nmade.listen()\ntime.sleep(60)\n"
NEVER = "sys.exit('unix_listener: cannot listen to path: Too many open files')\n"
LOST = "made.listen()\nmade.accept()\nsys.exit('Connection to host closed.')\n"


@pytest.fixture
def tunnels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Tunnels]:
    def made(ssh: str) -> Tunnels:
        (tmp_path / "ssh").write_text(SSH + ssh)
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return Tunnels(lambda: Door("127.0.0.1", 22, None, tmp_path), lambda: tmp_path / "0.sock")

    return made


def test_a_tunnel_is_open_once_its_socket_takes_connections(tunnels: Callable[[str], Tunnels]) -> None:
    opened = tunnels(LATE)
    try:
        with ThreadPoolExecutor(2) as pool:
            # Two disks of one server are opened at once.
            path, other = pool.map(opened.to, ["/there", "/there"])
            assert path == other
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(path))
        assert opened.cause("/there") == ""
    finally:
        opened.close_all()


def test_an_ssh_that_cannot_listen_is_reported(tunnels: Callable[[str], Tunnels]) -> None:
    opened = tunnels(NEVER)
    with pytest.raises(SourceUnreachable, match="Too many open files"):
        opened.to("/there")
    opened.close_all()


def test_a_tunnel_says_why_it_was_lost(tunnels: Callable[[str], Tunnels]) -> None:
    opened = tunnels(LOST)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(opened.to("/there")))
            assert made.recv(1) == b""
        assert opened._open["/there"]._child is not None
        opened._open["/there"]._child.wait(10)
        assert opened.cause("/there") == "ssh has ended with 1: Connection to host closed."
        assert opened.cause("/elsewhere") == ""
    finally:
        opened.close_all()
