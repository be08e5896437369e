"""Freezes a running guest's file systems for a moment, while its disks are frozen: by its agent, with a guard that thaws it.

    guard ready ─▶ freeze ─▶ the caller's moment ─▶ thaw ─▶ the agent reports «thawed» ─▶ guard ends

A guest that stays frozen hangs until an operator thaws it. So another process, started before, thaws the guest if this one is
killed, or stuck, or too slow (thaw_guard.py).
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from synvirt import xml_document
from synvirt.errors import GuestStillFrozen, Internal, SynvirtError
from synvirt.kvm import agent
from synvirt.kvm.connection import load
from synvirt.kvm.qemu_user import embedded_root
from synvirt.kvm.thaw_guard import HOLD_S, STATUS

GUARD = Path(__file__).with_name("thaw_guard.py")
# For the start of Python on a host under load. The guard imports nothing but libvirt.
READY_TIMEOUT_S = 30
CONNECTED_WITHIN_S = 3.0
# Shorter than HOLD_S. If the agent does not answer in this time, the process that asked it to freeze thaws the guest.
FREEZE_TIMEOUT_S = 8
THAW_PATIENCE_S = 30.0
PAUSE_S = 0.5
_AGENT = "org.qemu.guest_agent.0"

_log = structlog.get_logger("synvirt.hypervisor")


@dataclass
class Still:
    """The result, complete once the block has ended. `quiesced`: the guest froze and thawed, and nothing else thawed it in
    between. `why_not` is for people. `freeze_ms`: how long its file systems were frozen, at most."""

    quiesced: bool = False
    by_applications: bool = False
    why_not: str = ""
    freeze_ms: int | None = None


@contextlib.contextmanager
def still(uri: str, domain: Any, before: Callable[[], None] = lambda: None) -> Iterator[Still]:
    """The block runs while the guest's file systems are frozen, if that is possible. GuestStillFrozen, where it does not thaw.

    `before` is called last before the freezing, after all steps that take time.
    """
    found = Still()
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(_guard(uri, domain)) if _answers(domain) else None
        if guard is None:
            found.why_not = "its guest agent does not answer, or it is not certain that it could be thawed"
            before()
            yield found
            return
        # Where an agent has VSS, it freezes the applications too (QEMU Guest Agent Protocol Reference, guest-fsfreeze-freeze).
        found.by_applications = agent.is_windows(domain)
        before()
        guard.say("hold")
        began = time.monotonic()
        frozen = _freeze(domain, found)
        try:
            yield found
        finally:
            thawed = _thaw(domain)
            held_s = time.monotonic() - began
            guard.say("thawed")
        if frozen:
            found.freeze_ms = round(held_s * 1000)
            found.quiesced = thawed == frozen and held_s < HOLD_S
            if not found.quiesced:
                found.why_not = f"it was thawed by something else, or paused for over {HOLD_S:g} s"


def _answers(domain: Any) -> bool:
    """Whether the agent answers. The agent of a guest that was just found, as after its start, is connected within moments."""
    until = time.monotonic() + CONNECTED_WITHIN_S
    while not (answered := agent.answers(domain)) and time.monotonic() < until:
        time.sleep(PAUSE_S)
    return answered


def _freeze(domain: Any, found: Still) -> int:
    """Freezes; the number of file systems."""
    try:
        domain.agentSetResponseTimeout(FREEZE_TIMEOUT_S, 0)
        count = int(domain.fsFreeze())
    except load().libvirtError as error:
        found.why_not = str(error.get_error_message() or error)
        return 0
    if count == 0:
        found.why_not = "its guest agent found no file system to freeze"
    return count


def _thaw(domain: Any) -> int:
    """Thaws; the number of file systems. GuestStillFrozen, where the agent does not confirm it."""
    until, count, last = time.monotonic() + THAW_PATIENCE_S, 0, ""
    while True:
        try:
            count += int(domain.fsThaw())
            if agent.ask(domain, STATUS) == "thawed":
                return count
            last = "its agent says that it is frozen"
        except (load().libvirtError, SynvirtError) as error:
            last = str(error)
        if time.monotonic() > until:
            raise GuestStillFrozen(
                f"{domain.name()} does not thaw: {last}",
                hint=f"virsh domfsthaw {domain.name()}; if its agent is gone, virsh reset ends it",
            )
        time.sleep(PAUSE_S)


# ── the guard ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Guard:
    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child

    def say(self, word: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(f"{word}\n".encode())
            self._child.stdin.flush()


@contextlib.contextmanager
def _guard(uri: str, domain: Any) -> Iterator[_Guard | None]:
    """Starts the guard. None, where it does not start: then nothing is frozen. At the end it is left alone: without a message
    it thaws until the guest is thawed."""
    try:
        child = _started(uri, domain)
    except OSError as error:
        _log.error("nothing can be started that would thaw the guest: it is not frozen", guest=domain.name(), cause=str(error))
        child = None
    if child is None:
        yield None
        return
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(RuntimeError):  # there is no thread: it is waited for at this process' end
        threading.Thread(target=child.wait, daemon=True).start()
    try:
        ready = select.select([child.stdout], [], [], READY_TIMEOUT_S)[0] and child.stdout.readline() == b"ready\n"
        if not ready:
            _log.error("nothing could thaw the guest if the service ended: it is not frozen", guest=domain.name())
        yield _Guard(child) if ready else None
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()


def _started(uri: str, domain: Any) -> "subprocess.Popen[bytes] | None":
    """None, where its agent's connection is not found. OSError."""
    argv = [sys.executable, "-P", str(GUARD), uri, domain.UUIDString()]
    embedded = embedded_root(uri) is not None
    descriptor = _agents_connection(domain) if embedded else None
    if embedded and descriptor is None:
        return None
    try:
        return subprocess.Popen(
            argv if descriptor is None else [*argv, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=() if descriptor is None else (descriptor,),
            start_new_session=True,
        )
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _agents_connection(domain: Any) -> int | None:
    """A duplicate of libvirt's own connection to the guest's agent, as there can be only one at a time."""
    root = xml_document.parse(str(domain.XMLDesc(0)), "libvirt's XML", wrong=Internal)
    channels = root.iterfind(f"devices/channel/target[@name='{_AGENT}']/../source")
    paths = [one.get("path") for one in channels]
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family == socket.AF_UNIX and connection.getpeername() in paths:
                    return connection.detach()
    return None
