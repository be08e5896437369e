"""VMs as rows and manifests: the forms of v4 (Prism Central) and v3 (Prism Element) become one.

A disk's key is its address, `scsi.0`: v2, v3 and v4 all have it, but each has a different id for the disk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from synvirt.live import VmRow
from synvirt.live.nutanix.prism import dig, listed, number, text
from synvirt.live.nutanix.ways import Way
from synvirt.machines import smbios
from synvirt.machines.boot_order import by_bus
from synvirt.machines.concerns import removable_media_left_out, settings_left_out
from synvirt.machines.texts import clean, uuid_of
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, Nic, VmManifest
from synvirt.sizes import MIB

_BUSES: Final[Mapping[str, DiskBus]] = {"SCSI": "scsi", "IDE": "ide", "SATA": "sata", "PCI": "virtio", "SPAPR": "scsi"}
Power = Literal["on", "off", "suspended", "unknown"]
_POWER: Final[Mapping[str, Power]] = {"ON": "on", "OFF": "off", "PAUSED": "suspended", "SUSPENDED": "suspended"}
_LINUX: Final = ("linux", "ubuntu", "debian", "centos", "red hat", "rhel", "rocky", "alma", "suse", "oracle", "fedora")
# The limit for names that others chose.
_NAME_CHARS: Final = 255


@dataclass(frozen=True, slots=True)
class FoundDisk:
    """`id` is this Prism's id of the disk; `file_id` that of its file, if it differs."""

    key: str
    bus: str
    index: int
    id: str
    file_id: str
    size: int
    container_id: str
    container: str


@dataclass(frozen=True, slots=True)
class FoundVm:
    """A VM from either Prism, with its disks and cards. `bios_uuid`: the UUID that its guest sees; older versions give none."""

    id: str
    bios_uuid: str
    name: str
    power: Power
    uefi: bool
    secure_boot: bool
    tpm: bool
    sockets: int
    cores: int
    memory_bytes: int
    guest: str
    host: str
    cluster_id: str
    tools: bool
    quiescible: bool
    disks: tuple[FoundDisk, ...]
    nics: tuple[Nic, ...]
    boot_disk: str = ""
    volume_groups: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    passed_through: int = 0
    start: str = ""
    clock: str = ""
    discs: tuple[str, ...] = ()
    pinned: bool = False
    ports: int = 0


# ── v4 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_central(vm: Mapping[str, Any], containers: Mapping[str, str], subnets: Mapping[str, str]) -> FoundVm:
    """A VM of Prism Central (v4). `containers`, `subnets`: their names by id."""
    boot, tools = dig(vm, "bootConfig"), dig(vm, "guestTools")
    disks = listed(vm.get("disks"))
    held = [one for one in disks if text(one, "backingInfo", "volumeGroupExtId")]
    return FoundVm(
        id=text(vm, "extId"),
        bios_uuid=text(vm, "biosUuid"),
        name=_named(vm.get("name"), vm.get("extId")),
        power=_POWER.get(text(vm, "powerState"), "unknown"),
        uefi=text(boot, "$objectType").endswith("UefiBoot"),
        secure_boot=dig(boot, "isSecureBootEnabled") is True,
        tpm=dig(vm, "vtpmConfig", "isVtpmEnabled") is True,
        sockets=number(vm.get("numSockets")) or 1,
        # For the guest, v4's threads of a core are processors, too.
        cores=(number(vm.get("numCoresPerSocket")) or 1) * (number(vm.get("numThreadsPerCore")) or 1),
        memory_bytes=number(vm.get("memorySizeBytes")),
        guest=text(tools, "guestInfo", "guestOsFullName") or text(tools, "guestOsVersion"),
        host=text(vm, "host", "extId"),
        cluster_id=text(vm, "cluster", "extId"),
        tools=dig(tools, "isInstalled") is True,
        quiescible=dig(tools, "isVssSnapshotCapable") is True and dig(tools, "isReachable") is True,
        disks=tuple(_central_disk(one, containers) for one in disks if one not in held),
        nics=tuple(_central_nic(one, subnets) for one in listed(vm.get("nics"))),
        boot_disk=_key(dig(boot, "bootDevice", "diskAddress"), "busType", "index"),
        volume_groups=tuple(dict.fromkeys(text(one, "backingInfo", "volumeGroupExtId") for one in held)),
        gpus=tuple(text(one, "name") or text(one, "mode") or "a GPU" for one in listed(vm.get("gpus"))),
        passed_through=len(listed(vm.get("pcieDevices"))),
        start=f"{text(vm, 'updateTime')} {text(vm, 'generationUuid')}",
        clock=text(vm, "hardwareClockTimezone"),
        discs=tuple(
            _key(dig(one, "diskAddress"), "busType", "index") for one in listed(vm.get("cdRoms")) if one.get("backingInfo")
        ),
        pinned=vm.get("isVcpuHardPinningEnabled") is True,
        ports=len(listed(vm.get("serialPorts"))),
    )


def _central_disk(disk: Mapping[str, Any], containers: Mapping[str, str]) -> FoundDisk:
    backing, container = dig(disk, "backingInfo"), text(disk, "backingInfo", "storageContainer", "extId")
    return FoundDisk(
        key=_key(dig(disk, "diskAddress"), "busType", "index"),
        bus=text(disk, "diskAddress", "busType"),
        index=number(dig(disk, "diskAddress", "index")),
        id=text(disk, "extId"),
        file_id=text(backing, "diskExtId"),
        size=number(dig(backing, "diskSizeBytes")),
        container_id=container,
        container=containers.get(container, ""),
    )


def _central_nic(nic: Mapping[str, Any], subnets: Mapping[str, str]) -> Nic:
    """v4.0 has it in `backingInfo` and `networkInfo`, later versions in `nicBackingInfo` and `nicNetworkInfo` too."""
    backing = dig(nic, "nicBackingInfo") or dig(nic, "backingInfo")
    network = dig(nic, "nicNetworkInfo") or dig(nic, "networkInfo")
    subnet = text(network, "subnet", "extId")
    learned = [text(one, "value") for one in listed(dig(network, "ipv4Info", "learnedIpAddresses"))]
    assigned = text(network, "ipv4Config", "ipAddress", "value")
    return Nic(
        key=text(nic, "extId"),
        mac=text(backing, "macAddress") or None,
        model=(text(backing, "model") or "VIRTIO").lower(),
        network=subnets.get(subnet) or subnet,
        connected=dig(backing, "isConnected") is not False,
        ip_addresses=tuple(dict.fromkeys(filter(None, [assigned, *learned]))),
    )


# ── v3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_element(entity: Mapping[str, Any]) -> FoundVm:
    """A VM of Prism Element (v3)."""
    status, resources = dig(entity, "status"), dig(entity, "status", "resources") or {}
    tools, boot = dig(resources, "guest_tools", "nutanix_guest_tools"), dig(resources, "boot_config")
    of_disks = [one for one in listed(resources.get("disk_list")) if _device_type(one) == "DISK"]
    held = [one for one in of_disks if one.get("volume_group_reference")]
    boot_type = text(boot, "boot_type").upper()
    return FoundVm(
        id=text(entity, "metadata", "uuid"),
        bios_uuid=text(resources, "bios_uuid"),
        name=_named(dig(status, "name"), dig(entity, "metadata", "uuid")),
        power=_POWER.get(text(resources, "power_state").upper(), "unknown"),
        uefi=boot_type in ("UEFI", "SECURE_BOOT"),
        secure_boot=boot_type == "SECURE_BOOT",
        tpm=dig(resources, "vtpm_config", "vtpm_enabled") is True,
        sockets=number(resources.get("num_sockets")) or 1,
        cores=(number(resources.get("num_vcpus_per_socket")) or 1) * (number(resources.get("num_threads_per_core")) or 1),
        memory_bytes=number(resources.get("memory_size_mib")) * MIB,
        guest=text(tools, "guest_os_version") or text(resources, "guest_os_id"),
        host=text(resources, "host_reference", "name") or text(resources, "host_reference", "uuid"),
        cluster_id=text(status, "cluster_reference", "uuid"),
        tools=text(tools, "state").upper() == "ENABLED",
        quiescible=dig(tools, "vss_snapshot_capable") is True and dig(tools, "is_reachable") is True,
        disks=tuple(_element_disk(one) for one in of_disks if one not in held),
        nics=tuple(_element_nic(one) for one in listed(resources.get("nic_list"))),
        boot_disk=_key(dig(boot, "boot_device", "disk_address"), "adapter_type", "device_index"),
        volume_groups=tuple(dict.fromkeys(text(one, "volume_group_reference", "uuid") for one in held)),
        gpus=tuple(text(one, "name") or text(one, "mode") or "a GPU" for one in listed(resources.get("gpu_list"))),
        start=f"{text(entity, 'metadata', 'last_update_time')} {text(entity, 'metadata', 'spec_version')}",
        clock=text(resources, "hardware_clock_timezone"),
        discs=tuple(
            _key(dig(one, "device_properties", "disk_address"), "adapter_type", "device_index")
            for one in listed(resources.get("disk_list"))
            if _device_type(one) == "CDROM" and (one.get("data_source_reference") or number(one.get("disk_size_bytes")))
        ),
        pinned=resources.get("is_vcpu_hard_pinned") is True,
        ports=len(listed(resources.get("serial_port_list"))),
    )


def _device_type(disk: Mapping[str, Any]) -> str:
    return text(disk, "device_properties", "device_type").upper() or "DISK"


def _element_disk(disk: Mapping[str, Any]) -> FoundDisk:
    address = dig(disk, "device_properties", "disk_address")
    return FoundDisk(
        key=_key(address, "adapter_type", "device_index"),
        bus=text(address, "adapter_type").upper(),
        index=number(dig(address, "device_index")),
        id=text(disk, "uuid"),
        file_id="",
        size=number(disk.get("disk_size_bytes")) or number(disk.get("disk_size_mib")) * MIB,
        container_id=text(disk, "storage_config", "storage_container_reference", "uuid"),
        container=text(disk, "storage_config", "storage_container_reference", "name"),
    )


def _element_nic(nic: Mapping[str, Any]) -> Nic:
    return Nic(
        key=text(nic, "uuid"),
        mac=text(nic, "mac_address") or None,
        model=(text(nic, "model") or "virtio").lower(),
        network=text(nic, "subnet_reference", "name") or text(nic, "subnet_reference", "uuid"),
        connected=nic.get("is_connected") is not False,
        ip_addresses=tuple(filter(None, (text(one, "ip") for one in listed(nic.get("ip_endpoint_list"))))),
    )


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _key(address: Any, bus: str, index: str) -> str:
    return f"{text(address, bus).lower()}.{number(dig(address, index))}" if text(address, bus) else ""


def _named(name: Any, id_: Any) -> str:
    return "".join(char for char in str(name or id_ or "") if char.isprintable())[:_NAME_CHARS]


def row(vm: FoundVm) -> VmRow:
    """A VM for a source's list."""
    return VmRow(
        vm_id=vm.id,
        name=vm.name,
        power_state=vm.power,
        cpu_count=vm.sockets * vm.cores,
        memory_bytes=vm.memory_bytes,
        capacity_bytes=sum(disk.size for disk in vm.disks),
        guest_os=vm.guest,
        host=vm.host,
    )


def manifest(vm: FoundVm, way: Way) -> VmManifest:
    """The VM as a VmManifest. `way`: the way to read its disks, which decides whether it can be copied warm."""
    disks = tuple(
        Disk(
            key=disk.key,
            label=disk.key,
            capacity_bytes=disk.size,
            bus=_BUSES.get(disk.bus, "scsi"),
            controller=disk.bus.lower(),
            unit=disk.index,
            boot_order=1 if disk.key == vm.boot_disk else None,
            source_path=f"{disk.container or disk.container_id}/{disk.id}",
            cbt_enabled=way.no_deltas is None,
            cbt_reason=way.no_deltas,
        )
        for disk in by_bus(vm.disks, lambda disk: disk.bus, lambda disk: (disk.index,))
    )
    return VmManifest(
        vm_id=vm.id,
        name=vm.name,
        uuid=uuid_of(vm.bios_uuid) or vm.id,
        serial=smbios.ahv_serial(vm.id.lower(), uuid_of(vm.bios_uuid)),
        host=vm.host,
        power_state=vm.power,
        firmware="uefi" if vm.uefi else "bios",
        secure_boot=vm.secure_boot,
        tpm=vm.tpm,
        cpu_count=vm.sockets * vm.cores,
        cores_per_socket=vm.cores,
        memory_bytes=vm.memory_bytes,
        guest_os=_guest_os(vm.guest),
        cbt_available=way.no_deltas is None,
        cbt_reason=way.no_deltas,
        disks=disks,
        nics=vm.nics,
        concerns=tuple(_concerns(vm, way, disks)),
    )


def _guest_os(name: str) -> GuestOs:
    low = name.lower()
    family: Literal["windows", "linux", "other"] = "other"
    if "windows" in low:
        family = "windows"
    elif any(word in low for word in _LINUX):
        family = "linux"
    return GuestOs(family=family, id="", name=name[:200])


def _concerns(vm: FoundVm, way: Way, disks: Sequence[Disk]) -> Iterator[Concern]:
    yield Concern(
        id="nutanix.read_by",
        category="Information" if way.open else "Critical",
        label="How the disks are read",
        assessment="; ".join(f"{disk.label} by {way.description}" for disk in disks) or "It has no disks.",
        remedy="options.transport of the source chooses another way.",
    )
    for group in vm.volume_groups:
        yield Concern(
            id=f"nutanix.volume_group:{group}",
            category="Critical",
            label="Disks of a volume group",
            assessment=f"Volume group {group} is attached to the VM: its disks are in no snapshot of it, and are not moved.",
            remedy="Copy their data onto disks of the VM, or waive this and move them by other means.",
        )
    for number_, gpu in enumerate(vm.gpus):
        yield _warning(f"nutanix.gpu:{number_}", "GPU", f"The guest has {gpu} of its host; here it has none.")
    if vm.passed_through:
        yield _warning("nutanix.passthrough", "Passthrough devices", f"{vm.passed_through} devices of its host stay behind.")
    if vm.discs:
        yield removable_media_left_out(tuple(f"a disc at {clean(place)}" for place in vm.discs))
    if settings := list(_settings(vm)):
        yield settings_left_out(settings)
    if vm.tpm:
        yield Concern(
            id="nutanix.vtpm",
            category="Warning",
            label="Virtual TPM",
            assessment="The content of its virtual TPM is not migrated: Prism does not export it.",
            remedy="Have recovery keys at hand where the guest keeps secrets in it (BitLocker), or suspend BitLocker.",
        )
    if vm.power == "suspended":
        yield Concern(
            id="nutanix.suspended",
            category="Critical",
            label="Paused VM",
            assessment="What it has in its memory is not moved, and is lost when it is powered off for the cut-over.",
            remedy="Resume it, or power it off, at the source first.",
        )
    state, remedy = _guest_tools(vm)
    yield Concern(
        id="nutanix.guest_tools", category="Information", label="Nutanix Guest Tools", assessment=state, remedy=remedy
    )


def _settings(vm: FoundVm) -> Iterator[str]:
    """What the guest does not have here, where the clock of a Windows is this host's local time, and of all others UTC."""
    windows = _guest_os(vm.guest).family == "windows"
    if vm.clock and (windows or vm.clock != "UTC"):
        yield f"a hardware clock in {clean(vm.clock)}"
    if vm.pinned:
        yield "pinned processors"
    if vm.ports > 1:
        yield f"{vm.ports} serial ports"


def _guest_tools(vm: FoundVm) -> tuple[str, str]:
    """What the tools do for its snapshots, and a hint."""
    if not vm.tools:
        return "They are not seen: snapshots are as after a crash.", "Nothing: file systems with a journal take that."
    if vm.quiescible:
        return "They are installed, and freeze its file systems for a snapshot.", "Remove them after the move."
    return (
        f"They are installed, and do not freeze its file systems{'' if vm.power == 'on' else ': it does not run'}.",
        "Enable their VSS snapshots, or take snapshots as after a crash; remove them after the move.",
    )


def _warning(id_: str, label: str, assessment: str) -> Concern:
    return Concern(
        id=id_,
        category="Warning",
        label=label,
        assessment=assessment,
        remedy="Assign one of this host's afterwards, if the guest needs it.",
    )
