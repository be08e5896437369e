"""A real NFSv3 server: nfs-ganesha (Debian's nfs-ganesha-vfs), a container an export, its allow-list that of the State.

Ganesha must tell a portmapper where it listens, and would want the machine's own on port 111. It gets one that takes note of
nothing, on a socket in a mount namespace of its own: clients are told the ports.
"""

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synvirt.programs import end_group
from tests.fakes.prism.state import State
from tests.needs import need, need_root
from tests.running.ports import free_port
from tests.running.processes import stopped

START_TIMEOUT_S = 60
PLUGINS = "/usr/lib/x86_64-linux-gnu/ganesha"


@contextmanager
def nfs_server(folder: Path, state: State) -> Iterator[tuple[int, int]]:
    """(NFS port, mount port). The containers' files are served as they are, read-only."""
    need("ganesha.nfsd", "nfs-ganesha nfs-ganesha-vfs")
    need_root("a mount namespace, in which an NFS server finds a portmapper")
    folder.mkdir()
    run, log, config = folder / "run", folder / "log", folder / "ganesha.conf"
    run.mkdir()
    ports = free_port(), free_port()
    config.write_text(_config(folder, state, ports))
    # As short as a socket's name must be.
    with _portmapper(run / "rpcbind.sock"):
        inside = f'mount --bind "{run}" /run && exec ganesha.nfsd -F -L "{log}" -f "{config}" -p "{folder}/pid" -N EVENT'
        with subprocess.Popen(
            ["unshare", "-m", "sh", "-c", inside], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as child:
            try:
                _wait(child, log, "NFS SERVER INITIALIZED", 0)

                def reread() -> None:
                    before = log.read_text().count(REREAD)
                    config.write_text(_config(folder, state, ports))
                    os.kill(child.pid, signal.SIGHUP)
                    _wait(child, log, REREAD, before)

                state.on_list = reread

                def signalled(number: int) -> None:
                    os.killpg(child.pid, number)
                    if number == signal.SIGSTOP:
                        stopped(child.pid)

                state.signal_nfs = signalled
                yield ports
            finally:
                state.on_list, state.signal_nfs = lambda: None, lambda _number: None
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGCONT)
                end_group(child)


REREAD = "Reread exports complete"


def _wait(child: "subprocess.Popen[bytes]", log: Path, line: str, before: int) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while not log.exists() or log.read_text().count(line) <= before:
        assert child.poll() is None, log.read_text()[-2000:] if log.exists() else "it said nothing"
        assert time.monotonic() < until, log.read_text()[-2000:] if log.exists() else "it said nothing"
        time.sleep(0.02)


def _config(folder: Path, state: State, ports: tuple[int, int]) -> str:
    parts = [
        f"""NFS_CORE_PARAM {{ NFS_Port = {ports[0]}; MNT_Port = {ports[1]}; NFS_Protocols = 3; Bind_addr = 127.0.0.1;
        Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; Mount_Path_Pseudo = true; Plugins_Dir = "{PLUGINS}"; }}
        NFSv4 {{ RecoveryRoot = "{folder}/recovery"; Graceless = true; }}"""
    ]
    for number, name in enumerate(state.containers, 1):
        clients = ", ".join(entry.partition("/")[0] for entry in state.listed(name))
        let_in = f"CLIENT {{ Clients = {clients}; Access_Type = RO; }}" if clients else ""
        parts.append(
            f"""EXPORT {{ Export_Id = {number}; Path = "{state.folder / name}"; Pseudo = "/{name}"; Access_Type = None;
            Squash = No_Root_Squash; SecType = sys; Protocols = 3; FSAL {{ Name = VFS; }} {let_in} }}"""
        )
    return "\n".join(parts)


@contextmanager
def _portmapper(path: Path) -> Iterator[None]:
    """RFC 1833, as far as a server that registers itself goes: to every question, yes."""
    with socket.socket(socket.AF_UNIX) as listening:
        # Relative: a test's folder has a longer name than a socket may have.
        here = os.open(path.parent, os.O_PATH)
        try:
            listening.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)
        listening.listen(16)
        threading.Thread(target=_accept, args=(listening,), daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket) -> None:
    while True:
        try:
            connected, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_say_yes, args=(connected,), daemon=True).start()


def _say_yes(connected: socket.socket) -> None:
    with connected, connected.makefile("rb") as stream:
        while len(mark := stream.read(4)) == 4:
            call = stream.read(struct.unpack(">I", mark)[0] & 0x7FFFFFFF)
            (xid,), (procedure,) = struct.unpack_from(">I", call), struct.unpack_from(">I", call, 20)
            answer = struct.pack(">6I", xid, 1, 0, 0, 0, 0) + (struct.pack(">I", 1) if procedure else b"")
            connected.sendall(struct.pack(">I", 0x80000000 | len(answer)) + answer)
