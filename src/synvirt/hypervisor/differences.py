"""The differences between the domain here and its source, with reasons: a list that the job shows. Pure."""

from collections.abc import Callable, Container, Iterator

from synvirt.hypervisor.hardware import (
    LEAST_MEMORY_BYTES,
    bus_now,
    bus_of,
    card,
    large_sectors,
    macs,
    memory_bytes,
    processors,
    serial_of,
    uuid_of,
    why_bus,
)
from synvirt.hypervisor.machine import Machine
from synvirt.machines.boot_entries import are_made_anew
from synvirt.machines.concerns import REACHING, SETTINGS_LEFT_OUT
from synvirt.model.job import Difference
from synvirt.model.machine import Nic, VmManifest
from synvirt.sizes import MIB, SECTOR_BYTES

Network = Callable[[Nic], tuple[str, str]]


def differences(
    machine: Machine, *, name: str, network: Network, places: Container[str], tpm: bool, variables: bool
) -> tuple[Difference, ...]:
    """The differences. `name`: the domain's; `network`: what a card is connected to here; `places`: the keys of the cards that
    keep theirs; `tpm`: whether this host can give one; `variables`: whether the source's UEFI variables are used."""
    manifest = machine.manifest
    return (
        *_identity(machine, manifest, name),
        *_size(machine, manifest),
        *_firmware(manifest, tpm=tpm, variables=variables),
        *_disks(machine, manifest),
        *_cards(machine, manifest, network, places),
        *_left_out(manifest),
    )


def _identity(machine: Machine, manifest: VmManifest, name: str) -> Iterator[Difference]:
    if name != manifest.name:
        asked = machine.target.name == name
        why = "target.name asks for it" if asked else "libvirt names files after it: plain characters only, not too many"
        yield _difference("name", manifest.name, name, why)
    uuid = str(uuid_of(machine))
    if manifest.uuid and uuid != manifest.uuid.lower():
        yield _difference("uuid", manifest.uuid, uuid, _why_another_uuid(machine, manifest))

    if manifest.serial and serial_of(machine) is None:
        yield _difference("serial number", manifest.serial, "none", "target.identity is new")


def _why_another_uuid(machine: Machine, manifest: VmManifest) -> str:
    if machine.target.identity == "new":
        return "target.identity is new"
    if manifest.guest_os.family in manifest.uuid_reversed_for:
        return "the guest reads it so there: its firmware has the bytes in another order"
    return "the source's is none"


def _size(machine: Machine, manifest: VmManifest) -> Iterator[Difference]:
    sockets, cores = processors(machine)
    count = sockets * cores
    if count != manifest.cpu_count:
        why = "target.cpu_count asks for it" if machine.target.cpu_count else "the source does not say"
        yield _difference("processors", str(manifest.cpu_count), str(count), why)
    if cores != manifest.cores_per_socket:
        why = f"{count} processors are not a whole number of sockets with {manifest.cores_per_socket} cores"
        yield _difference("cores per socket", str(manifest.cores_per_socket), str(cores), why)
    memory = memory_bytes(machine)
    if memory != manifest.memory_bytes:
        least = "nothing boots with less" if memory == LEAST_MEMORY_BYTES else "a guest here has whole MiB"
        why = "target.memory_bytes asks for it" if machine.target.memory_bytes else least
        yield _difference("memory", _mib(manifest.memory_bytes), _mib(memory), why)


def _firmware(manifest: VmManifest, *, tpm: bool, variables: bool) -> Iterator[Difference]:
    keys = "Microsoft's keys and " if manifest.secure_boot else ""
    if manifest.firmware == "uefi" and variables and are_made_anew(manifest):
        why = "each firmware keeps them in a form of its own; its disk has no loader at /EFI/BOOT"
        yield _difference("uefi variables", "its own", f"{keys}an entry for each loader on its disks", why)
    if manifest.firmware == "uefi" and not variables:
        yield _difference(
            "uefi variables",
            "its own",
            f"{keys}an empty list of boot entries",
            "each firmware keeps them in a form of its own; the disk's default loader, /EFI/BOOT, is started",
        )
    if manifest.tpm:
        here = "an empty TPM 2.0" if tpm else "none"
        why = "a TPM does not give out its secrets" if tpm else "this host has no swtpm: apt-get install swtpm swtpm-tools"
        yield _difference("tpm", "a TPM with its secrets", here, why)


def _disks(machine: Machine, manifest: VmManifest) -> Iterator[Difference]:
    skipped = machine.skipped
    number = 0
    for disk in manifest.disks:
        if disk.key in skipped:
            yield _difference(f"disk {disk.key}", disk.label, "none", "skip_disks leaves it out")
            continue
        bus = bus_of(number, bus_now(machine))
        number += 1
        if bus != disk.bus:
            why = why_bus(machine) if bus == bus_now(machine) else "an IDE controller has room for four disks"
            yield _difference(f"bus of disk {disk.key}", f"{disk.bus} {disk.controller}".strip(), bus, why)
        if disk.sector_bytes != SECTOR_BYTES and large_sectors(disk, bus) is None:
            why = f"a disk on {bus} has no others: the guest finds nothing on it"
            yield _difference(f"sectors of disk {disk.key}", f"{disk.sector_bytes} bytes", f"{SECTOR_BYTES} bytes", why)


def _cards(machine: Machine, manifest: VmManifest, network: Network, places: Container[str]) -> Iterator[Difference]:
    addresses = macs(machine)
    for nic in manifest.nics:
        model, mac = card(machine, nic), addresses[nic.key]
        if model != nic.model.lower():
            why = "the guest has its driver" if model == "virtio" else "its driver is part of every system of that age"
            yield _difference(f"model of network card {nic.key}", nic.model or "unknown", model, why)
        if mac != (nic.mac or "").strip().lower().replace("-", ":"):
            new = machine.target.identity == "new"
            why = "target.identity is new" if new else "the source's is none that a card can have, or has it twice"
            yield _difference(f"mac of network card {nic.key}", nic.mac or "none", mac, why)
        if nic.linux_name and nic.key not in places and manifest.guest_os.family == "linux":
            why = "this host has no such place for it: find it by its MAC address in the guest's network configuration"
            yield _difference(f"name of network card {nic.key}", nic.linux_name, "another one", why)
        here = ":".join(filter(None, network(nic)))
        if here != nic.network:
            mapped = any(entry.source == nic.network for entry in machine.target.network_map)
            why = "target.network_map says so" if mapped else "target.network_map does not name it: this host's default"
            yield _difference(f"network of network card {nic.key}", nic.network or "none", here, why)


def _left_out(manifest: VmManifest) -> Iterator[Difference]:
    for concern in manifest.concerns:
        if concern.id == SETTINGS_LEFT_OUT:
            yield _difference(
                "settings", concern.assessment, "none", "the domain here is built only from what every guest gets"
            )
        elif concern.id.partition(":")[0] in REACHING:
            yield _difference(
                "what reaches into its host", concern.assessment, "none", "the domain here is built only from what is harmless"
            )


def _difference(what: str, source: str, here: str, why: str) -> Difference:
    return Difference(what=what, source=source, here=here, why=why)


def _mib(count: int) -> str:
    return f"{count / MIB:.12g} MiB"  # `g` alone says 2.09715e+06 of two TiB
