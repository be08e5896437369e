"""A guest of the sample that runs at once: the first of a run boots and is saved (`virsh save`), all go on from there.

A boot takes six seconds of a processor, where it is emulated; to go on takes one."""

import fcntl
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synvirt.live.libvirt.manifest import data_disks, parse
from synvirt.sample import Sample
from tests.servers.libvirt_lab import LibvirtLab

CHANNEL = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
# More than its devices take: a card is plugged in later, as each guest has another, or none.
SLOTS = "<controller type='pci' index='0' model='pcie-root'/>" + "<controller type='pci' model='pcie-root-port'/>" * 8
# libvirt's XML is at its beginning; what comes behind it holds neither name nor UUID as text.
HEAD_BYTES = 64 << 10
# The second disk holds nothing, and could not be tracked.
SECOND_DISK = ("2G", "raw")


def started(host: LibvirtLab, sample: Sample, cards: str, until_ready: Callable[[Any], None]) -> Any:
    """A domain of its own name, UUID and disks. `until_ready`: waits until a domain that boots may be saved."""
    assert sample.raw is not None
    saved = sample.raw.with_suffix(".saved")
    with sample.raw.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not saved.exists():
            _save(host, sample.raw, saved, until_ready)
    disks = [host.disk("1M"), host.disk(*SECOND_DISK)]
    shutil.copyfile(_disk_of(saved), disks[0])
    domain = host.domain(*disks, extra=CHANNEL + SLOTS + cards, memory_mib=256)
    _go_on(host, saved, domain, disks)
    if cards:
        domain.attachDevice(cards)
    return domain


def _disk_of(saved: Path) -> Path:
    return saved.with_suffix(".qcow2")


def _save(host: LibvirtLab, raw: Path, saved: Path, until_ready: Callable[[Any], None]) -> None:
    disk, partial = host.disk("1M"), saved.with_suffix(".partial")
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)], check=True)
    domain = host.domain(disk, host.disk(*SECOND_DISK), extra=CHANNEL + SLOTS, memory_mib=256)
    domain.create()
    until_ready(domain)
    domain.save(str(partial))
    domain.undefine()
    shutil.copyfile(disk, _disk_of(saved))
    partial.rename(saved)


def _go_on(host: LibvirtLab, saved: Path, domain: Any, disks: list[Path]) -> None:
    """libvirt takes a saved domain by its name and UUID alone: they are written over those of the first, as long as they."""
    own = host.folder / f"{domain.name()}.saved"
    shutil.copyfile(saved, own)
    xml = host.connection.saveImageGetXMLDesc(str(own), 0)
    first = parse(xml)
    with own.open("r+b") as file:
        head = file.read(HEAD_BYTES)
        for name, now in (("name", domain.name()), ("uuid", domain.UUIDString())):
            before = first.findtext(name, "")
            assert len(before) == len(now)
            head, xml = head.replace(before.encode(), now.encode()), xml.replace(before, now)
        file.seek(0)
        file.write(head)
    for (_, disk), path in zip(data_disks(first), disks, strict=True):
        source = disk.find("source")
        assert source is not None
        xml = xml.replace(source.get("file", ""), str(path))
    host.connection.restoreFlags(str(own), xml, 0)
    own.unlink()
