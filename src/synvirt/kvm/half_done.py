"""Calls of libvirt that were half done as the service was killed: its record of each running guest is made true.

    record   run/qemu/NAME.xml: <job>, <blockjobs>, <backups>, and in a <disk> its <source>, <backingStore> and <mirror>
    QEMU     its jobs, and the block node that each device has

The embedded driver dies with the service, in the middle of a call. Then its record may lack the mirror of a copy that runs, or
have a mirror whose job has ended; or libvirt itself cannot read it (9.0: a mirror of job ''). The disk would move no more, or
libvirt would take the guest for one that is off. Or it has a backup that begins, and nothing of that backup: it would begin
for ever, and no other could. QEMU knows. So before the driver is opened, such jobs are ended there as they are, without a
pivot; the record gets the disk's source as QEMU has it, without these jobs; and QEMU loses the nodes of no disk.

Formats: libvirt's src/qemu/qemu_domain.c (qemuDomainObjPrivateXMLFormat) and src/conf/domain_conf.c
(virDomainDiskDefFormatMirror); commands: QEMU's qapi/job.json, qapi/block-core.json. Blocking code.
"""

import contextlib
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET  # of libvirt's own files, in a folder that only the service may write to

import structlog

from synvirt.durable import put_private_file
from synvirt.errors import Internal, SynvirtError
from synvirt.kvm.qmp import Qmp, QmpError, rows

log = structlog.get_logger(__name__)

_HALF_DONE = re.compile(rb"<mirror |<blockjob [^>]*type='(?:copy|active-commit)'|<job [^>]*async='backup'")
# libvirt's kinds of block jobs, and QEMU's.
_OF_MOVES: Final = {"copy": "mirror", "active-commit": "commit"}
_OF_BACKUPS: Final = {"backup": "backup", "create": "create"}
# A job ends when the requests under way have, which a slow disk holds up.
ENDED_WITHIN_S, LOOK_EVERY_S = 60.0, 0.05
_NODE = re.compile(r"libvirt-[0-9]+-(?:format|storage)")


def mend(root: Path) -> None:
    """Call it before the driver with this folder is opened. A guest whose record cannot be made true stays as it is."""
    for record in sorted(root.glob("run/qemu/*.xml")):
        try:
            if _HALF_DONE.search(record.read_bytes()):
                _mend(root, record)
        except (OSError, ET.ParseError, SynvirtError) as error:
            log.warning("the record of a guest may be wrong, and stays as it is", guest=record.stem, cause=str(error))


def _mend(root: Path, record: Path) -> None:
    """OSError, ParseError, SynvirtError: also where QEMU runs no more, and there is nothing to do."""
    guest = ET.fromstring(record.read_bytes())  # noqa: S314 - libvirt's own
    monitor, backup = guest.find("monitor"), guest.find("job[@async='backup']")
    if monitor is None:
        raise Internal("it names no monitor")
    if backup is not None and guest.find("backups/domainbackup") is not None:
        return  # libvirt finds it again
    kinds = _OF_MOVES if backup is None else _OF_BACKUPS
    with Qmp(Path(monitor.get("path", "")), record.stem) as qmp:
        if backup is None and _is_found_again(guest, qmp):
            return
        _end_jobs(qmp, kinds.values())
        nodes = {str(row.get("qdev")): (row.get("inserted") or {}).get("node-name") for row in rows(qmp.ask("query-block"))}
        moved = [disk for disk in guest.iterfind("domain/devices/disk") if _settled(disk, nodes)]
        for jobs in guest.iterfind("blockjobs"):
            for one in [one for one in jobs if one.get("type") in kinds]:
                jobs.remove(one)
            jobs.set("active", "yes" if len(jobs) else "no")
        if backup is not None:
            backup.attrib = {"type": "none", "async": "none"}
            with contextlib.suppress(QmpError):  # it was not begun
                qmp.ask("nbd-server-stop")
        # The file for the guest's next start is first: as long as the record shows the mirror, this begins again.
        if moved:
            _move_at_next_start(root / "etc/qemu" / record.name, moved)
        _write(record, guest)
        _delete_nodes(qmp, set(_nodes_of(guest)))
    log.info("a call for a guest was half done as the service ended", guest=record.stem, kinds=list(kinds), moved=len(moved))


def _is_found_again(guest: ET.Element, qmp: Qmp) -> bool:
    """Whether the jobs only copy, which may take hours, and have their mirrors in the record: libvirt goes on with them."""
    states = [job.get("status") for job in _jobs(qmp, _OF_MOVES.values())]
    mirrors = [mirror.get("job") for mirror in guest.iterfind("domain/devices/disk/mirror")]
    return 0 < len(states) == len(mirrors) and set(states) == {"running"} and all(mirrors)


def _jobs(qmp: Qmp, kinds: Collection[str]) -> list[dict[str, Any]]:
    return [job for job in rows(qmp.ask("query-jobs")) if job.get("type") in kinds]


def _end_jobs(qmp: Qmp, kinds: Collection[str]) -> None:
    """Internal, where one does not end in ENDED_WITHIN_S."""
    deadline = time.monotonic() + ENDED_WITHIN_S
    while jobs := _jobs(qmp, kinds):
        for job in jobs:
            # It may have ended meanwhile by itself, and then needs the other one.
            with contextlib.suppress(QmpError):
                qmp.ask("job-dismiss" if job.get("status") == "concluded" else "job-cancel", {"id": job.get("id")})
        if time.monotonic() > deadline:
            raise Internal("its block job does not end")
        time.sleep(LOOK_EVERY_S)


def _settled(disk: ET.Element, nodes: dict[str, str | None]) -> bool:
    """Makes the disk one without a mirror. Whether it is on the file of the mirror. Internal, where it is on neither."""
    mirror = disk.find("mirror")
    if mirror is None:
        return False
    qom, alias = disk.find("privateData/qom"), disk.find("alias")
    names = [element.get("name", "") for element in (qom, alias) if element is not None]
    node = next((nodes[name] for name in names if name in nodes), None)
    own, other = (next(_nodes_of(place, "format"), None) for place in (disk.find("source"), mirror.find("source")))
    if node is None or node not in (own, other):
        raise Internal(f"QEMU has it on the node {node}, and the record on {own} or {other}")
    disk.remove(mirror)
    if node != other:
        return False
    _replace(disk, "source", mirror.find("source"))
    _replace(disk, "backingStore", mirror.find("backingStore"))
    _set_kind(disk, mirror.get("type"), mirror.find("format"))
    return True


def _replace(disk: ET.Element, name: str, other: ET.Element | None) -> None:
    """A mirror shows no chain below a volume, which is the last of its chain."""
    old = disk.find(name)
    new = ET.Element(name) if other is None else other
    if old is None:
        disk.append(new)
    else:
        disk[list(disk).index(old)] = new


def _set_kind(disk: ET.Element, kind: str | None, form: ET.Element | None) -> None:
    disk.set("type", kind or "file")
    driver = disk.find("driver")
    if driver is not None and form is not None:
        driver.set("type", form.get("type", "raw"))


def _move_at_next_start(path: Path, moved: list[ET.Element]) -> None:
    """As libvirt itself does at a pivot, in the guest's configuration."""
    domain = ET.fromstring(path.read_bytes())  # noqa: S314 - libvirt's own
    for now in moved:
        dev, source, driver = _dev(now), now.find("source"), now.find("driver")
        for disk in domain.iterfind("devices/disk"):
            old = disk.find("source")
            if _dev(disk) != dev or source is None or old is None:
                continue
            for name in ("file", "dev"):
                old.attrib.pop(name, None)
                if name in source.attrib:
                    old.set(name, source.attrib[name])
            _set_kind(disk, now.get("type"), driver)
            if (chain := disk.find("backingStore")) is not None:
                disk.remove(chain)
    _write(path, domain)


def _dev(disk: ET.Element) -> str | None:
    target = disk.find("target")
    return None if target is None else target.get("dev")


def _write(path: Path, root: ET.Element) -> None:
    put_private_file(path, ET.tostring(root, encoding="utf-8"))


def _nodes_of(element: ET.Element | None, kind: str | None = None) -> Iterator[str]:
    if element is not None:
        for node in element.iter("nodename"):
            if "name" in node.attrib and kind in (None, node.get("type")):
                yield node.attrib["name"]


def _delete_nodes(qmp: Qmp, kept: set[str]) -> None:
    """Deletes libvirt's nodes that are in no chain any more. A node in use is deleted after its user."""
    while True:
        found = [str(row.get("node-name")) for row in rows(qmp.ask("query-named-block-nodes", {"flat": True}))]
        deleted = 0
        for name in found:
            if name not in kept and _NODE.fullmatch(name):
                with contextlib.suppress(QmpError):
                    qmp.ask("blockdev-del", {"node-name": name})
                    deleted += 1
        if not deleted:
            return
