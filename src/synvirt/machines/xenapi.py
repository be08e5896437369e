"""XenAPI's records as a manifest: those of a pool, and those in an XVA archive's ova.xml.

    VM ─▶ VBDs ─▶ VDIs      VM ─▶ VIFs ─▶ networks      VM ─▶ guest_metrics

A record is a mapping of XenAPI's own field names (the XenServer Management API). Releases add and drop fields, so every field
has a default. Numbers and booleans may come as such or as text.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from synvirt.machines import concerns, reaching, smbios
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, is_true, uuid_of, whole_number
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, Nic, Snapshot, VmManifest
from synvirt.sizes import GIB, sized

Record = Mapping[str, Any]
NULL: Final = "OpaqueRef:NULL"
# Values of a VM's `domain_type`: Xen itself starts the kernel of these, without firmware.
_PARAVIRTUALISED: Final = frozenset({"pv", "pv_in_pvh", "pvh"})
# A suspended VM has its memory in a file, a paused one in its host's memory: a copy has neither.
_POWER: Final = {"Running": "on", "Halted": "off", "Suspended": "suspended", "Paused": "suspended"}
# Keys of `bios_strings`: a VM whose licence is its host's has the values of that, by which the licence is checked.
_OWN_STRINGS: Final = (
    *("system-manufacturer", "system-product-name", "system-version"),
    *("baseboard-serial-number", "enclosure-asset-tag"),
)
# No more host devices than these are named one by one.
_DEVICES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Records:
    """Class → reference → record."""

    by_class: dict[str, dict[str, Record]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Record]:
        return self.by_class.get(kind, {})

    def at(self, kind: str, reference: str) -> Record:
        """Empty where there is no such object."""
        return self.of(kind).get(reference, {})


def manifest(records: Records, vm_ref: str, *, disk_key: Callable[[str, Record], str]) -> VmManifest:
    """The VM `vm_ref` of the records, which contain only it and its snapshots. `disk_key`: the key of a VDI, by reference and
    record.

    The caller sets whether its changes are tracked."""
    vm = records.at("VM", vm_ref)
    boot, platform = (table(vm, key) for key in ("HVM_boot_params", "platform"))
    uefi = text(boot, "firmware").lower() == "uefi"
    secure_boot = uefi and wants_secure_boot(vm)
    tpm = bool(listed(vm, "VTPMs")) or is_true(text(platform, "vtpm"))
    guest = _guest_os(records, vm)
    cpus = whole_number(text(vm, "VCPUs_at_startup")) or whole_number(text(vm, "VCPUs_max")) or 1
    cores = whole_number(text(platform, "cores-per-socket")) or 1
    memory = whole_number(text(vm, "memory_static_max")) or whole_number(text(vm, "memory_dynamic_max"))
    disks, found = _disks(records, vm, disk_key)
    if not disks:
        found.append(concerns.no_disks())
    if memory is None:
        found.append(concerns.hardware_incomplete("memory"))
    snapshots = tuple(
        Snapshot(id=reference, name=clean(text(each, "name_label")))
        for reference, each in records.of("VM").items()
        if reference != vm_ref and is_true(text(each, "is_a_snapshot"))
    )
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest, snapshots=len(snapshots))
    if text(vm, "power_state") == "Suspended":
        found.append(concerns.suspended())
    found += [concerns.passthrough_device(name) for name in passed_through(vm)]
    if reaches := reaching.xen(vm, platform):
        found.append(concerns.left_out(reaches))
    if is_paravirtualised(vm):
        found.append(concerns.paravirtualised())
    if settings := [*_settings_left_out(vm), *_settings_of_devices(records, vm)]:
        found.append(concerns.settings_left_out(list(dict.fromkeys(map(clean, settings)))))
    if media := [records.at("VBD", reference) for reference in listed(vm, "VBDs") if _has_disc(records.at("VBD", reference))]:
        names = (clean(text(records.at("VDI", text(vbd, "VDI")), "name_label")) for vbd in media)
        found.append(concerns.removable_media_left_out(tuple(name or "a disc" for name in names)))
    return VmManifest(
        vm_id=vm_ref,
        name=clean(text(vm, "name_label")) or "imported",
        uuid=uuid_of(text(vm, "uuid")),
        uuid_reversed_for=smbios.WINDOWS,
        # Without one of its own, the firmware shows the UUID (hvmloader).
        serial=smbios.serial_of(text(table(vm, "bios_strings"), "system-serial-number")) or uuid_of(text(vm, "uuid")),
        power_state=_POWER.get(text(vm, "power_state"), "unknown"),
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=cpus,
        cores_per_socket=cores if cpus % cores == 0 else 1,
        memory_bytes=memory or GIB,
        guest_os=guest,
        disks=disks,
        nics=_nics(records, vm),
        snapshots=snapshots,
        concerns=tuple(found),
    )


def power_state(vm: Record) -> str:
    """The power state in the words of VmRow and VmManifest."""
    return _POWER.get(text(vm, "power_state"), "unknown")


def wants_secure_boot(vm: Record) -> bool:
    """auto: the pool's setting; the pool enforces Secure Boot where it has keys."""
    return text(table(vm, "platform"), "secureboot").lower() in ("true", "auto")


def is_paravirtualised(vm: Record) -> bool:
    """By its `domain_type`. XenServer before 7.5 has none: there a Xen boot loader, or a kernel outside the VM, shows it."""
    kind = text(vm, "domain_type")
    if kind and kind != "unspecified":
        return kind in _PARAVIRTUALISED
    return bool(text(vm, "PV_bootloader") or text(vm, "PV_kernel"))


def passed_through(vm: Record) -> list[str]:
    """PCI devices in the form of xl and xapi («0/0000:04:00.0,0/0000:04:00.1»), virtual GPUs and USB devices."""
    devices = [device.strip().rpartition("/")[2] for device in text(table(vm, "other_config"), "pci").split(",")[:_DEVICES_MAX]]
    more = [name for name, kept in (("a virtual GPU", "VGPUs"), ("a USB device", "VUSBs")) if listed(vm, kept)]
    return [clean(device) for device in devices if device] + more


def disk_vbds(records: Records, vm: Record) -> list[Record]:
    """The VBDs with a disk, by their device numbers: XenServer's firmware boots them in this order."""
    attached = [records.at("VBD", reference) for reference in listed(vm, "VBDs")]
    disks = [vbd for vbd in attached if text(vbd, "type") != "CD" and text(vbd, "VDI") in records.of("VDI")]
    return sorted(disks, key=_device)


def _settings_left_out(vm: Record) -> Iterator[str]:
    strings = table(vm, "bios_strings")
    for name in _OWN_STRINGS:
        if text(strings, name) not in ("", "Xen", "HVM domU"):
            yield f"{name} of its SMBIOS"
    most = whole_number(text(vm, "VCPUs_max")) or 0
    if most > (whole_number(text(vm, "VCPUs_at_startup")) or most):
        yield f"up to {most} processors"
    if table(vm, "VCPUs_params"):
        yield f"limits of its processors ({', '.join(sorted(table(vm, 'VCPUs_params')))})"
    least, memory = (whole_number(text(vm, f"memory_{which}")) or 0 for which in ("dynamic_min", "static_max"))
    if 0 < least < memory:
        yield f"memory that its pool may take back, down to {sized(least)}"


def _settings_of_devices(records: Records, vm: Record) -> Iterator[str]:
    for vbd in disk_vbds(records, vm):
        vdi = records.at("VDI", text(vbd, "VDI"))
        name = text(vdi, "name_label") or f"disk {_device(vbd)}"
        if text(vbd, "mode").upper() == "RO" or is_true(text(vdi, "read_only")):
            yield f"{name} can only be read"
        if text(vdi, "on_boot") == "reset":
            yield f"{name} is reset at each start"
        if text(vbd, "qos_algorithm_type"):
            yield f"limits of {name}"
    for vif in (records.at("VIF", reference) for reference in listed(vm, "VIFs")):
        if text(vif, "qos_algorithm_type"):
            yield f"limits of card {text(vif, 'MAC')}"
        if text(vif, "locking_mode") == "locked":
            yield f"the addresses that card {text(vif, 'MAC')} is locked to"


def _has_disc(vbd: Record) -> bool:
    return text(vbd, "type") == "CD" and bool(text(vbd, "VDI")) and not is_true(text(vbd, "empty"))


def _guest_os(records: Records, vm: Record) -> GuestOs:
    """The guest's system by its tools, else by the VM's template."""
    system = clean(text(table(records.at("VM_guest_metrics", text(vm, "guest_metrics")), "os_version"), "name").split("|")[0])
    platform = table(vm, "platform")
    windows = is_true(text(platform, "viridian")) or text(platform, "device_id") == "0002"
    template = text(table(vm, "other_config"), "base_template_name") or text(vm, "reference_label").replace("-", " ")
    return guest_os(description=system or clean(template or ("Windows (viridian)" if windows else "")))


def _disks(records: Records, vm: Record, disk_key: Callable[[str, Record], str]) -> tuple[tuple[Disk, ...], list[Concern]]:
    disks: dict[str, Disk] = {}
    found: list[Concern] = []
    attached = disk_vbds(records, vm)
    boots = _boots(vm, attached)
    for order, vbd in enumerate(attached):
        vdi = records.at("VDI", text(vbd, "VDI"))
        key = disk_key(text(vbd, "VDI"), vdi)
        if key in disks:
            continue
        # The first four are IDE disks to firmware and guest, until the guest's Xen drivers start; only these see the others.
        bus: DiskBus = "ide" if order < 4 else "scsi"
        label = clean(text(vdi, "name_label")) or f"disk {_device(vbd)}"
        disks[key] = Disk(
            key=key,
            label=label if label not in {disk.label for disk in disks.values()} else f"{label} ({_device(vbd)})",
            capacity_bytes=whole_number(text(vdi, "virtual_size")) or 0,
            used_bytes=whole_number(text(vdi, "physical_utilisation")),
            format="xva",
            bus=bus,
            controller=f"{bus}{order // 2 if bus == 'ide' else 0}",
            unit=order % 2 if bus == "ide" else order - 4,
            boot_order=1 if vbd is boots else None,
            source_path=text(vbd, "VDI"),
        )
        if is_true(text(vdi, "sharable")):
            found.append(concerns.shared_disk(key))
    return tuple(disks.values()), found


def _boots(vm: Record, attached: list[Record]) -> Record | None:
    """The VBD that the VM boots from. Only Xen's boot loader for paravirtualised guests reads `bootable`. The firmware of all
    others boots the first disk, whatever a VBD that was moved or added later says."""
    if not is_paravirtualised(vm):
        return next(iter(attached), None)
    return next((vbd for vbd in attached if is_true(text(vbd, "bootable"))), None)


def _nics(records: Records, vm: Record) -> tuple[Nic, ...]:
    vifs = {reference: records.at("VIF", reference) for reference in listed(vm, "VIFs") if reference in records.of("VIF")}
    addresses = table(records.at("VM_guest_metrics", text(vm, "guest_metrics")), "networks")
    return tuple(
        Nic(
            key=reference,
            mac=text(vif, "MAC").lower() or None,
            network=clean(text(records.at("network", text(vif, "network")), "name_label")),
            connected=_may_pass(vif, records.at("network", text(vif, "network"))),
            ip_addresses=_addresses(addresses, str(_device(vif))),
        )
        for reference, vif in sorted(vifs.items(), key=lambda each: _device(each[1]))
    )


def _may_pass(vif: Record, network: Record) -> bool:
    """Whether its switch takes frames of the card at all."""
    mode = text(vif, "locking_mode") or "network_default"
    return (text(network, "default_locking_mode") if mode == "network_default" else mode) != "disabled"


def _addresses(networks: Record, device: str) -> tuple[str, ...]:
    """The addresses in `VM_guest_metrics.networks`: «0/ip», «0/ipv4/0», «0/ipv6/0»."""
    found = [str(value) for key, value in sorted(networks.items()) if key.split("/", 1)[0] == device]
    return tuple(dict.fromkeys(clean(address) for address in found if address))


def _device(attached: Record) -> int:
    return whole_number(text(attached, "userdevice") or text(attached, "device")) or 0


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def text(record: Record, key: str) -> str:
    """A field as text; empty, where it is missing or a null reference."""
    value = record.get(key, "")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) and value != NULL else ""


def table(record: Record, key: str) -> Record:
    """The field as a mapping; empty, where it is not one."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def listed(record: Record, key: str) -> list[str]:
    """The texts in the field; none, where it is not a list."""
    value = record.get(key)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
