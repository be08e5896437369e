"""What libvirt shows of a guest from outside: its state, its restarts, its disks' counters, its screen."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synvirt.hypervisor import console, held_up
from synvirt.hypervisor.boot import Seen
from synvirt.kvm import agent
from synvirt.kvm.connection import load

# The most bytes of a picture. The guest chooses the size of its screen; 4K without compression has 24 MiB.
SCREENSHOT_LIMIT_BYTES = 32 << 20
_PIECE_BYTES = 256 << 10


def look(domain: Any, console_log: Path, *, at_s: float, resets: int) -> Seen:
    """Everything at once. A guest that goes away meanwhile counts as stopped. Its state is asked for once, and first: whatever
    a guest without room shows on its console, it is not booted."""
    state = _state(domain)
    if (full := _full(domain, state)) is not None:
        return Seen(at_s, trouble=f"was paused: what it writes has no room in {full}", full=True, hopeless=True, resets=resets)
    trouble, hopeless = _trouble(state)
    if trouble is not None:
        return Seen(at_s, trouble=trouble, hopeless=hopeless, console=console.text(console_log), resets=resets)
    requests, writes = _disk_requests(domain)
    return Seen(
        at_s,
        agent=agent.answers(domain),
        console=console.text(console_log),
        screen=screen_text(domain),
        resets=resets,
        requests=requests,
        writes=writes,
    )


def can_see(domain: Any) -> bool:
    """Whether the connection that gave this domain still works."""
    libvirt = load()
    try:
        return bool(domain.connect().isAlive())
    except libvirt.libvirtError:
        return False


def screen_text(domain: Any) -> str:
    """The text of a screen in text mode, from the card's memory; empty in another mode."""
    libvirt = load()
    try:
        return console.screen(domain.memoryPeek(console.SCREEN_ADDRESS, console.SCREEN_BYTES, libvirt.VIR_MEMORY_PHYSICAL))
    except libvirt.libvirtError:
        return ""


def screenshot(connection: Any, domain: Any) -> bytes | None:
    """The screen as a PNG (QEMU 7.1 or later). None, where the guest has no screen or is off."""
    libvirt = load()
    try:
        stream = connection.newStream(0)
        if domain.screenshot(stream, 0, 0) != "image/png":
            stream.abort()
            return None
        pieces = bytearray()
        while piece := stream.recv(_PIECE_BYTES):
            pieces += piece
            if len(pieces) > SCREENSHOT_LIMIT_BYTES:
                stream.abort()
                return None
        stream.finish()
    except libvirt.libvirtError:
        return None
    return bytes(pieces)


@contextlib.contextmanager
def restarts(connection: Any, domain: Any) -> Iterator[list[None]]:
    """A list that grows by one with each restart of the guest while the block runs."""
    libvirt = load()
    seen: list[None] = []
    try:
        number = connection.domainEventRegisterAny(
            domain, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, lambda *_: seen.append(None), None
        )
    except libvirt.libvirtError:  # a driver without events: the other signs are left
        number = None
    try:
        yield seen
    finally:
        if number is not None:
            with contextlib.suppress(libvirt.libvirtError):
                connection.domainEventDeregisterAny(number)


def _state(domain: Any) -> list[int] | None:
    """The state and its reason; None: the domain is gone."""
    with contextlib.suppress(load().libvirtError):
        found: list[int] = domain.state()
        return found
    return None


def _full(domain: Any, state: list[int] | None) -> str | None:
    """What has no room for what this domain writes, if QEMU has paused it for that."""
    if state is None or not held_up.says(state):
        return None
    with contextlib.suppress(load().libvirtError):  # it went meanwhile
        return held_up.why(domain).full
    return None


def _trouble(found: list[int] | None) -> tuple[str | None, bool]:
    """Why a domain in this state will not boot any more, and whether that is so on every disk bus. None, while it may boot."""
    libvirt = load()
    if found is None:
        return "is gone", True
    state, reason = found
    if state in (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED, libvirt.VIR_DOMAIN_NOSTATE):
        return None, False
    if state == libvirt.VIR_DOMAIN_PAUSED:
        if reason == libvirt.VIR_DOMAIN_PAUSED_IOERROR:
            return "was paused, since a volume could not be read or written", True
        # An operator who has paused the guest will resume it; libvirt itself pauses it while it starts.
        return ("crashed", True) if reason == libvirt.VIR_DOMAIN_PAUSED_CRASHED else (None, False)
    if state == libvirt.VIR_DOMAIN_CRASHED or reason == libvirt.VIR_DOMAIN_SHUTOFF_CRASHED:
        return "crashed and stopped", True
    return "stopped before it had booted", reason == libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED


def _disk_requests(domain: Any) -> tuple[int, int]:
    """For all disks together since the start: the number of reads and writes, and of writes."""
    libvirt = load()
    try:
        reads, _, writes, _, _ = domain.blockStats("")  # the empty name: all disks together
    except libvirt.libvirtError:
        return 0, 0
    return reads + writes, writes
