"""The bus by which a Linux guest's kernel finds its root file system, as the drivers in its initramfs say.

Tools that make an initramfs for one machine (dracut's host-only mode, MODULES=dep of initramfs-tools, mkinitcpio's autodetect)
put in the drivers of that machine's disks alone. On another bus such a guest waits for its root file system for minutes, and
then stops.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from synvirt.model.machine import Concern, DiskBus, VmManifest

_PREFIX: Final = "boot-drivers:"
_NONE: Final = f"{_PREFIX}none"
_FACT: Final = "drivers in "
# Of each bus here, best first, the drivers that its disks need.
NEEDED: Mapping[DiskBus, frozenset[str]] = MappingProxyType(
    {
        "virtio": frozenset({"virtio_pci", "virtio_blk"}),
        "scsi": frozenset({"virtio_pci", "virtio_scsi", "sd_mod"}),
        "sata": frozenset({"ahci", "sd_mod"}),
        "ide": frozenset({"ata_piix", "sd_mod"}),
    }
)
_CALLED: Final[Mapping[str, str]] = MappingProxyType({"scsi": "SCSI (virtio-scsi)", "sata": "SATA", "ide": "IDE"})
_WITHOUT_SECURE_BOOT: Final = " Or switch Secure Boot off at the source before the copy: the guest then starts by IDE."
_ADDED: Final = "virtio_pci virtio_blk virtio_scsi"


def noted(manifest: VmManifest, facts: Mapping[str, str]) -> VmManifest:
    """The manifest of a Linux guest with a concern, where its initramfs has no driver for disks by virtio. `facts`: of its
    disks (model/facts.py); where they do not say what is in it, nothing is noted."""
    found = next(((file, value) for fact, value in facts.items() if (file := fact.removeprefix(_FACT)) != fact), None)
    concerns = [] if found is None else _concerns(manifest, *found)
    return manifest.with_concerns(concerns, in_place_of=lambda id_: id_.startswith(_PREFIX))


def finds_no_disk(manifest: VmManifest) -> bool:
    """Whether it was noted that the guest boots by no bus here, unless its initramfs is made anew."""
    return any(concern.id == _NONE for concern in manifest.concerns)


def first_bus(manifest: VmManifest) -> DiskBus | None:
    """The bus that was noted; None, where the guest boots by virtio, as far as is known, or by no bus here."""
    ids = {concern.id for concern in manifest.concerns}
    return next((bus for bus in NEEDED if f"{_PREFIX}{bus}" in ids), None)


def _concerns(manifest: VmManifest, file: str, value: str) -> list[Concern]:
    has = set(value.split(", "))
    buses = [bus for bus, needed in NEEDED.items() if needed <= has]
    if buses == ["ide"] and manifest.secure_boot:
        return [_none(file, "only for IDE, which comes with a chipset that has no Secure Boot", _WITHOUT_SECURE_BOOT)]
    if not buses:
        return [_none(file, "for none of the buses that its disks can have here")]
    return [] if buses[0] == "virtio" else [_other(file, buses[0])]


def _other(file: str, bus: DiskBus) -> Concern:
    return Concern(
        id=f"{_PREFIX}{bus}",
        category="Information",
        label="Initramfs without virtio drivers",
        assessment=f"The guest's {file} has no driver for disks by virtio, and one for {_CALLED[bus]}. So its disks come by "
        "that, unless the plan names a bus: by virtio it would not find its root file system, and stop.",
        remedy=f"In the guest, at the source or here: {_command(file)}. Then target.disk_bus may be virtio.",
    )


def _none(file: str, drivers: str, also: str = "") -> Concern:
    return Concern(
        id=_NONE,
        category="Warning",
        label="Initramfs without drivers for the disks here",
        assessment=f"The guest's {file} has drivers {drivers}: it would not find its root file system, and stop.",
        remedy="Install virt-v2v on this host: unless the plan's conversion is never, it makes the initramfs anew, also in a "
        f"retry of the job. Or in the guest at the source: {_command(file)}; then copy it again. Or start its rescue entry "
        f"here, and do the same there.{also}",
    )


def _command(file: str) -> str:
    name = file.rpartition("/")[2]
    if name.startswith("initrd.img"):
        words = " ".join(("printf '%s\\n'", _ADDED, ">> /etc/initramfs-tools/modules"))
        return f"{words} && update-initramfs -u -k all"
    if name.startswith("initramfs-linux"):
        return f"MODULES=({_ADDED}) in /etc/mkinitcpio.conf, and mkinitcpio -P"
    return f"dracut --force --regenerate-all --add-drivers '{_ADDED}'"
