"""The process that inspects untrusted files for the service. `looking.py` is the service's side, `look.py` what both say.

    service ─ a byte and two sockets ─▶ looker ─ fork ─▶ child ─▶ its order, its cage, the file, its answer, its end
                                          │ status socket: the child's pidfd, then how it ended

The looker has imported all that an inspection needs, and reads no untrusted file itself. It forks a child for each inspection
within milliseconds, so a file that breaks its reader affects no other file. It has one thread, so that a fork inherits no lock
of another thread.
"""

import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt import programs
from synvirt.cage import Cage, Network, enter
from synvirt.cage.scratch import scratch_folder
from synvirt.disks.roots import connected
from synvirt.errors import Internal, SynvirtError, UnsupportedFormat, cause_of
from synvirt.jobs.inspecting import points
from synvirt.jobs.inspecting.look import (
    BEGUN,
    CPU_S,
    MEMORY_BYTES,
    NOT_BEGUN,
    ORDER_BYTES_MAX,
    OUT_OF_MEMORY,
    WITH_PROGRAMS,
    Look,
)
from synvirt.jobs.orders import OpenedBeneath
from synvirt.model.kinds import OfflineKind
from synvirt.offline import browsing
from synvirt.offline.registry import detect, importer_for
from synvirt.offline.several import choosing
from synvirt.remote import Remote
from synvirt.sizes import MIB

# The size of a file that a child may write: enough for a program's standard error.
WRITTEN_BYTES = MIB
# How long a child may live, in case the service has not ended it before.
ALARM_LATER_S = 10


def cage_of(look: Look, folder: str | None) -> Cage:
    """The cage of a child: it may read the root that has all of a machine's files, and nothing else; it has a network for a
    remote file; it may read no file, if the order has the contents. `folder`: its own, for the sockets of programs."""
    remote = look.root if isinstance(look.root, Remote) else None
    if look.root is None:
        reads = []
    elif remote is None:
        reads = [str(look.root), str(Path(str(look.root)).resolve())]
    else:
        reads = [remote.ca_file] if remote.ca_file else []
    local = Network.LOCAL if look.programs else Network.NONE
    return Cage(
        reads=tuple(reads),
        writes=() if folder is None else (folder,),
        network=local if remote is None else local | Network.ELSEWHERE,
        programs=look.programs,
        memory_bytes=MEMORY_BYTES,
        cpu_s=CPU_S,
        written_bytes=WRITTEN_BYTES,
    )


# ── the child ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _look(look: Look) -> str:
    """The answer to a question, as JSON."""
    if look.root is None:
        return points.answered(look.what, look.contents)
    match look.what:
        case "browse":
            found = browsing.browse(Path(str(look.root)), look.path, limit=look.limit, cursor=look.cursor)
            return found.model_dump_json()
        case "inspect":
            return browsing.inspect(look.root, look.path, vm=look.vm).model_dump_json()
    path = Path(look.path)
    with connected(look.root, within_s=look.within_s):
        if look.what == "detect":
            return json.dumps(detect(path, look.root).kind)
        importer = choosing(importer_for(OfflineKind(str(look.kind))), look.vm)
        if look.what == "manifest":
            return importer.inspect(path, look.root).model_dump_json()
        disk = importer.open_disk(path, look.root, look.key)
        return OpenedBeneath(reader=disk.reader, checksums=disk.checksums).to_line().decode()


def _answered(look: Look) -> dict[str, Any]:
    try:
        return {"ok": json.loads(_look(look))}
    except SynvirtError as error:
        return {"error": _problem(error)}
    except MemoryError:
        raise
    except Exception as error:
        return {"error": _problem(Internal(f"inspecting it failed: {type(error).__name__}: {error}"))}


def _problem(error: SynvirtError) -> dict[str, Any]:
    holds = error.holds if isinstance(error, UnsupportedFormat) else ()
    return {"kind": type(error).__name__, "code": error.code, "detail": error.detail, "hint": error.hint, "holds": holds}


def child(channel: socket.socket, folder: str | None, answered: Callable[[Look], dict[str, Any]] = _answered) -> None:
    """What a child does from its fork to its end. Only the channel is open."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _close_all_but(channel.fileno())
    order = bytearray()
    while part := channel.recv(1 << 16):
        order += part
        if len(order) > ORDER_BYTES_MAX:
            return
    look = Look.read(order)
    if folder is not None:
        tempfile.tempdir = folder
        os.environ["TMPDIR"] = folder
    programs.forbidden = not look.programs
    signal.alarm(int(look.within_s) + ALARM_LATER_S)
    answer: dict[str, Any]
    try:
        enter(cage_of(look, folder))
    except OSError as error:  # of this host, not of the file
        answer = {"error": _problem(Internal(f"the process that inspects files is not confined: {cause_of(error)}"))}
    else:
        answer = answered(look)
    if programs.refused:
        answer = {"needs_programs": programs.refused[:1]}
    channel.sendall(json.dumps(answer).encode())


def _close_all_but(kept: int) -> None:
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != kept:
            with suppress(OSError):
                os.close(descriptor)


# ── the looker ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Running:
    pid: int
    status: socket.socket
    folder: str | None
    closing: ExitStack


def serve(control: socket.socket, live: Callable[[socket.socket, str | None], None] = child) -> None:
    """Forks a child for each question, until the service closes the control socket."""
    poll, running = select.poll(), dict[int, _Running]()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                poll.unregister(descriptor)
                _ended(descriptor, running.pop(descriptor))
                continue
            message, descriptors = b"", list[int]()
            with suppress(ConnectionResetError):  # the service ended, and has not read that we are ready
                message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
            if not message:
                for one in running.values():
                    with suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGKILL)
                    _remove(one)
                return
            if (begun := _begun(message, [socket.socket(fileno=descriptor) for descriptor in descriptors], live)) is not None:
                pidfd, one = begun
                running[pidfd] = one
                poll.register(pidfd, select.POLLIN)


def _begun(
    message: bytes, sockets: list[socket.socket], live: Callable[[socket.socket, str | None], None]
) -> tuple[int, _Running] | None:
    """None, where there is no room for its folder, or the system has no more processes, descriptors or memory: it is answered
    why, and the children under way go on."""
    with ExitStack() as failing:
        for one in sockets:
            failing.enter_context(one)
        if len(sockets) != 2:  # there were not enough descriptors for them
            return None
        channel, status = sockets
        try:
            begun = _forked(message, channel, status, live)
        except OSError as error:
            with suppress(OSError):
                status.sendall(NOT_BEGUN + cause_of(error).encode())
            return None
        failing.pop_all()
    channel.close()
    return begun


def _forked(
    message: bytes, channel: socket.socket, status: socket.socket, live: Callable[[socket.socket, str | None], None]
) -> tuple[int, _Running]:
    with ExitStack() as held:
        folder = str(held.enter_context(scratch_folder("look"))) if message == WITH_PROGRAMS else None
        pid = _child(channel, folder, live)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        closing = held.pop_all()
    with suppress(OSError):  # the asking service has gone
        socket.send_fds(status, [BEGUN], [pidfd])
    return pidfd, _Running(pid, status, folder, closing)


def _child(channel: socket.socket, folder: str | None, live: Callable[[socket.socket, str | None], None]) -> int:
    """Its number. In the child this does not return."""
    pid = os.fork()
    if pid == 0:
        try:
            live(channel, folder)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def _ended(pidfd: int, one: _Running) -> None:
    os.close(pidfd)
    _, status = os.waitpid(one.pid, 0)
    with suppress(OSError):
        one.status.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    one.status.close()
    _remove(one)


def _remove(one: _Running) -> None:
    if one.folder is not None:
        programs.end_users(Path(one.folder))
    one.closing.close()


def preload() -> None:
    """Imports what readers import only when they need it. Else each child would import it again."""
    import encodings.idna
    import encodings.utf_16  # noqa: F401

    import synvirt.disks.nbd.qemu
    import synvirt.disks.qcow2.reader
    import synvirt.disks.vdi
    import synvirt.disks.vhd
    import synvirt.disks.vhdx.reader
    import synvirt.disks.vmdk.reader
    import synvirt.disks.xva.reader
    import synvirt.disks.xva.stream
    import synvirt.remote.http
    import synvirt.remote.reading
    import synvirt.remote.s3  # noqa: F401


def main() -> None:
    """The looker as a process: its first argument is the descriptor of the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C
    preload()
    control = socket.socket(fileno=int(sys.argv[1]))
    with suppress(BrokenPipeError):  # the service ended while it began: the loop sees that too
        control.send(b"ready")
    serve(control)


if __name__ == "__main__":
    main()
