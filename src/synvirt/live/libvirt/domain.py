"""A domain on another host: its facts, and how to switch it off and on. Blocking code.

To read a domain that is off, it is started but not run: QEMU opens its disks and serves them, and executes no guest
instruction. Before that a note in its configuration says so, so that an operator who finds it knows that it counts as off.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from xml.etree import ElementTree as ET  # only for writing: foreign XML is read by xml_document
from xml.etree.ElementTree import Element

import structlog

from synvirt.errors import SnapshotFailed, SourceUnreachable
from synvirt.live import GuestElsewhere, refuse_power_off
from synvirt.live.libvirt.host import library, unanswered
from synvirt.live.libvirt.manifest import DiskSize, PowerState, Seen, agent_connected, data_disks, parse
from synvirt.model.machine import Snapshot
from synvirt.model.plan import Shutdown

log = structlog.get_logger(__name__)

# Marks a domain in its metadata: names, not addresses to fetch.
STATE_NAMESPACE: Final = "https://synvirt.org/xmlns/live/1"
MOVED_NAMESPACE: Final = "https://synvirt.org/xmlns/moved/1"
# A guest agent answers in milliseconds, or is missing; but before a freeze, a guest writes out its memory.
AGENT_TIMEOUT_S: Final = 5
FREEZE_TIMEOUT_S: Final = 60
# The pause after a polite request was refused or not answered: a guest that boots does not answer.
ASK_AGAIN_S: Final = 20.0
POLL_S: Final = 0.2


# What QEMU and virtlockd say of an image that is open elsewhere: on this host, or on another that shares the storage.
_IN_USE: Final = re.compile(r"\block\b|another process using", re.IGNORECASE)
_IN_USE_HINT: Final = (
    "a disk of it is in use: if its guest was migrated to another host, it runs there, on the same disks: move it from there"
)


# ── notes in its configuration ───────────────────────────────────────────────────────────────────────────────────────


def noted(domain: Any) -> dict[str, str]:
    """`tracking`: its snapshots get checkpoints of these disks; `reading`: it was started only to be read, for the snapshot of
    that name; `running`: its guest ran when a job last read it."""
    libvirt = library()
    try:
        found = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, STATE_NAMESPACE, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            return {}
        if not domain.isPersistent():
            return {}
        raise
    return dict(parse(found).attrib)


def tracked(domain: Any) -> frozenset[str]:
    """The disks whose changes are tracked, by key."""
    return frozenset(noted(domain).get("tracking", "").split())


def note(domain: Any, **changed: str | None) -> None:
    """Writes notes into its configuration; None removes a note."""
    libvirt = library()
    before = noted(domain)
    after = {key: value for key, value in {**before, **changed}.items() if value is not None}
    if after == before:
        return
    xml = ET.tostring(ET.Element("state", after), encoding="unicode") if after else None
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, xml, "synvirt", STATE_NAMESPACE, libvirt.VIR_DOMAIN_AFFECT_CONFIG)


def note_running(domain: Any) -> None:
    """Notes that its guest runs, for `is_out_of_sight`. A transient domain has no notes, and is gone once it is off."""
    if domain.isPersistent() and power_state(domain) == "on":
        note(domain, running="yes")


def mark_moved(domain: Any, text: str) -> None:
    """Adds a note for people, and switches autostart off, as the domain would run next to its copy."""
    libvirt = library()
    xml = ET.tostring(ET.Element("moved", {"note": text}), encoding="unicode")
    domain.setMetadata(
        libvirt.VIR_DOMAIN_METADATA_ELEMENT, xml, "synvirt-moved", MOVED_NAMESPACE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
    )
    if domain.autostart():
        domain.setAutostart(0)


# ── off and on ───────────────────────────────────────────────────────────────────────────────────────────────────────


def being_read(domain: Any) -> bool:
    """Whether it was started only for its disks. If an operator resumed it, it has run, whatever the note says. Then it is
    paused for another reason: a stop would lose its memory."""
    libvirt = library()
    return bool(domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED) and "reading" in noted(domain) and not _has_run(domain)


def _has_run(domain: Any) -> bool:
    """The first instructions of a guest read its disks. QEMU's reads for us are not counted there."""
    libvirt = library()
    for key, _ in data_disks(described(domain)):
        try:
            reads, _bytes, writes, *_ = domain.blockStats(key)
        except libvirt.libvirtError as error:
            if unanswered(error):
                raise
            continue
        if reads > 0 or writes > 0:
            return True
    return False


def is_elsewhere(state: Sequence[int]) -> bool:
    """Whether its guest was moved to another host, or is just being moved there. `state`: libvirt's state and its reason. A
    domain that was moved and stays defined here is shut off, but its guest runs, on the same disks."""
    libvirt = library()
    moved = (
        (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_MIGRATED),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_MIGRATION),
        (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_POSTCOPY),
    )
    return tuple(state) in moved


def is_out_of_sight(domain: Any, state: Sequence[int]) -> bool:
    """Whether its guest ran when a job last read it, and libvirt does not know why it is off: libvirtd, or its host, was
    restarted since, and forgets then that a domain was migrated to another host."""
    return _is_off_unknown(state) and "running" in noted(domain)


def _is_off_unknown(state: Sequence[int]) -> bool:
    """Whether it is off, and libvirt does not know why."""
    libvirt = library()
    return tuple(state) == (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN)


def refuse_elsewhere(domain: Any) -> None:
    """GuestElsewhere, where its guest was moved to another host, or may have been: its disks are in use there, and it may not
    run here, too. SourceUnreachable, while it is being moved."""
    state = domain.state()
    if is_out_of_sight(domain, state):
        raise GuestElsewhere(
            f"{domain.name()} ran when it was last read, and its libvirtd was restarted since: whether its guest was shut "
            "down, or was migrated to another host and runs there, is not known; it is neither read nor started here",
            hint="if it runs nowhere, start it there, and submit it again; else add its new host as a source",
        )
    if not is_elsewhere(state):
        return
    if state[0] == library().VIR_DOMAIN_PAUSED:
        raise SourceUnreachable(f"{domain.name()} is being migrated to another host", hint="it is asked again")
    raise GuestElsewhere(
        f"{domain.name()} was migrated to another host, and its guest may run there: it is neither read nor started here",
        hint="add that host as a source, and submit the VM from there; if it runs nowhere, start it here, and submit it again",
    )


def power_state(domain: Any) -> PowerState:
    """The power state; a domain that is only started to be read counts as off, and one whose guest is on another host as
    unknown, as one that may be there."""
    libvirt = library()
    state, reason = domain.state()[:2]
    if is_elsewhere((state, reason)) or is_out_of_sight(domain, (state, reason)):
        return "unknown"
    if state in (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED):
        return "off"
    if state == libvirt.VIR_DOMAIN_PAUSED:
        return "off" if being_read(domain) else "suspended"
    return "suspended" if state == libvirt.VIR_DOMAIN_PMSUSPENDED else "on"


def last_start(domain: Any) -> str:
    """libvirt counts the starts of all its domains: the number of this one's, while it is active. A domain that was started
    only to be read has a number too, and another one once its guest has run."""
    number = domain.ID()
    return "off" if number < 0 else f"{number} {'held' if being_read(domain) else 'started'}"


def start_to_read(domain: Any, name: str) -> None:
    """Opens its disks, without running the guest. Does nothing, where the domain is already active."""
    libvirt = library()
    if domain.isActive():
        return
    refuse_elsewhere(domain)
    if domain.hasManagedSaveImage():
        raise SnapshotFailed(
            f"{domain.name()} has saved memory, which starting it would use up",
            hint="start it and shut it down, or drop the saved memory: virsh managedsave-remove NAME",
        )
    note(domain, reading=name)
    try:
        domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
    except libvirt.libvirtError as error:
        note(domain, reading=None)
        if unanswered(error):
            raise
        message = error.get_error_message() or str(error)
        raise SnapshotFailed(
            f"{domain.name()} is off, and cannot be started without running to be read: {message}",
            hint=_IN_USE_HINT
            if _IN_USE.search(message)
            else "it must be able to start on its own host: its memory, networks and devices free",
        ) from error


def stop_reading(domain: Any) -> None:
    """Ends a domain that was only started to be read. One that runs is left alone."""
    if being_read(domain):
        _off(domain)
    with contextlib.suppress(library().libvirtError):  # if transient, it was removed with its domain
        note(domain, reading=None)


@contextlib.contextmanager
def active(domain: Any, name: str) -> Iterator[None]:
    """Bitmaps change only in an open image: a domain that is off is started without running, and stopped afterwards."""
    was_off = not domain.isActive()
    if was_off:
        start_to_read(domain, name)
    try:
        yield
    finally:
        if was_off:
            stop_reading(domain)


def shut_down(domain: Any, timeout_s: float, stop: Callable[[], bool], manner: Shutdown = "polite") -> None:
    """Politely, and by force after `timeout_s`; off on return. SourceUnreachable, once `stop()` is true."""
    libvirt = library()
    refuse_elsewhere(domain)
    if being_read(domain):
        stop_reading(domain)
    deadline, ask_at = time.monotonic() + (0.0 if manner == "force" else timeout_s), 0.0
    while domain.isActive() and time.monotonic() < deadline:
        if stop():
            raise SourceUnreachable(f"the session was closed while {domain.name()} was shutting down")
        refuse_elsewhere(domain)
        # A paused guest does not answer.
        if domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
            break
        if time.monotonic() >= ask_at:
            _ask_politely(domain)
            ask_at = time.monotonic() + ASK_AGAIN_S
        time.sleep(POLL_S)
    if domain.isActive():
        refuse_power_off(domain.name(), manner, timeout_s, lambda: power_state(domain) == "suspended")
        log.warning("guest is powered off by force", domain=domain.name(), waited_s=timeout_s)
        _off(domain)
    refuse_elsewhere(domain)
    with contextlib.suppress(libvirt.libvirtError):  # if transient, it is gone
        note(domain, running=None)


def _ask_politely(domain: Any) -> None:
    libvirt = library()
    ways = [libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN]
    with contextlib.suppress(libvirt.libvirtError):
        if agent_connected(parse(domain.XMLDesc(0))):
            ways.insert(0, libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT)
    for way in ways:
        try:
            domain.shutdownFlags(way)
        except libvirt.libvirtError:
            continue  # off meanwhile, or this way is closed: then the next
        return


def _off(domain: Any) -> None:
    libvirt = library()
    try:
        domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID:
            return  # it is already off
        domain.destroy()


def power_on(domain: Any) -> None:
    """Starts the domain; one that was only started to be read is stopped first."""
    if being_read(domain):
        stop_reading(domain)
    refuse_elsewhere(domain)
    if not domain.isActive():
        domain.create()


# ── the guest's agent ────────────────────────────────────────────────────────────────────────────────────────────────


def may_freeze(domain: Any) -> bool:
    """Whether it runs and has an agent to ask."""
    return bool(domain.state()[0] == library().VIR_DOMAIN_RUNNING) and agent_connected(parse(domain.XMLDesc(0)))


@contextlib.contextmanager
def _answering(domain: Any, timeout_s: int) -> Iterator[None]:
    """Sets the agent's time limit for an answer; afterwards none, as in libvirt itself, since others use the agent, too."""
    libvirt = library()
    domain.agentSetResponseTimeout(timeout_s, 0)
    try:
        yield
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            domain.agentSetResponseTimeout(libvirt.VIR_DOMAIN_AGENT_RESPONSE_TIMEOUT_BLOCK, 0)


def freeze(domain: Any) -> None:
    """libvirtError: they may still freeze later, unless `agent_refused`."""
    with _answering(domain, FREEZE_TIMEOUT_S):
        domain.fsFreeze()


def agent_refused(error: Any) -> bool:
    """Whether the agent itself refused: then it has thawed again what it had frozen."""
    return "unable to execute QEMU agent command" in str(error)


def thaw(domain: Any) -> bool:
    """Whether nothing is frozen any more. Idempotent."""
    libvirt = library()
    if not domain.isActive():
        return True
    try:
        with _answering(domain, FREEZE_TIMEOUT_S):
            domain.fsThaw()
    except libvirt.libvirtError as error:
        log.warning("guest does not thaw", domain=domain.name(), cause=str(error))
        return False
    return True


# ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def described(domain: Any) -> Element:
    """The running domain's XML, with hot-plugged disks; else its configuration."""
    return parse(domain.XMLDesc(0))


def machine_described(domain: Any) -> Element:
    """The same; of one that is only started to be read, which counts as off, its configuration: no system in it has a balloon,
    so libvirt reports all of `memory` as present."""
    return parse(domain.XMLDesc(library().VIR_DOMAIN_XML_INACTIVE if power_state(domain) == "off" else 0))


def seen(domain: Any, root: Element, *, too_old: str | None, unreadable: str | None) -> Seen:
    """The facts of a domain from libvirt and the agent beyond its XML. `too_old`, `unreadable`: what its host cannot do, as a
    reason."""
    agent = power_state(domain) == "on" and agent_connected(root)
    guest = _os_of_guest(domain) if agent else {}
    return Seen(
        sizes={key: _size(domain, key) for key, _ in data_disks(root)},
        power_state=power_state(domain),
        persistent=bool(domain.isPersistent()),
        why_off_unknown=_is_off_unknown(domain.state()[:2]),
        saved=bool(domain.hasManagedSaveImage()),
        tracked=tracked(domain),
        guest=guest,
        addresses=_addresses(domain) if agent else {},
        snapshots=tuple(_snapshots(domain)),
        too_old=too_old,
        unreadable=unreadable,
    )


def capacity_bytes(domain: Any, disks: Iterable[str]) -> int:
    """The total of these disks."""
    return sum(_size(domain, key).capacity_bytes for key in disks)


def _size(domain: Any, key: str) -> DiskSize:
    libvirt = library()
    try:
        capacity, allocation, _physical = domain.blockInfo(key)
    except libvirt.libvirtError as error:
        if unanswered(error):
            raise
        return DiskSize(0, 0)  # a network disk of a domain that is off: its manifest says that the size is unknown
    return DiskSize(int(capacity), min(int(allocation), int(capacity)))


def _os_of_guest(domain: Any) -> dict[str, str]:
    libvirt = library()
    try:
        with _answering(domain, AGENT_TIMEOUT_S):
            found = domain.guestInfo(libvirt.VIR_DOMAIN_GUEST_INFO_OS, 0)
    except libvirt.libvirtError:
        return {}
    return {str(key).removeprefix("os."): str(value)[:255] for key, value in found.items()}


def _addresses(domain: Any) -> dict[str, tuple[str, ...]]:
    libvirt = library()
    try:
        with _answering(domain, AGENT_TIMEOUT_S):
            found = domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT, 0)
    except libvirt.libvirtError:
        return {}
    return {
        str(card["hwaddr"]).lower(): tuple(str(one["addr"]) for one in card["addrs"] or ())
        for card in found.values()
        if card.get("hwaddr")
    }


def _snapshots(domain: Any) -> Iterator[Snapshot]:
    for one in domain.listAllSnapshots(0):
        made = parse(one.getXMLDesc(0)).findtext("creationTime") or ""
        at = datetime.fromtimestamp(int(made), UTC) if made.isdecimal() else None
        yield Snapshot(id=str(one.getName()), name=str(one.getName()), created_at=at)
