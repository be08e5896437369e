"""A VM's configuration, as Proxmox VE writes it, read as a manifest; and what may run on a node. No I/O."""

from typing import Any

import pytest

from synvirt.errors import Internal, SnapshotFailed
from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox import keys
from synvirt.live.proxmox.manifest import manifest
from synvirt.live.proxmox.node import argv
from synvirt.live.proxmox.reading import image
from synvirt.live.proxmox.seen import Seen, Volume
from synvirt.model.machine import VmManifest
from synvirt.sizes import GIB, MIB
from tests.fakes.pve import schema

RUNS = {"status": "running", "qmpstatus": "running", "running-qemu": "9.2.0"}
FULL = {
    "name": "web",
    "bios": "ovmf",
    "machine": "pc-q35-9.0",
    "sockets": 2,
    "cores": 4,
    "memory": "4096",
    "balloon": 1024,
    "ostype": "win11",
    "scsihw": "virtio-scsi-single",
    "boot": "order=virtio1;scsi0;net0",
    "smbios1": "uuid=6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11,manufacturer=QUNNRQ==,base64=1",
    "efidisk0": "local-lvm:vm-100-disk-0,efitype=4m,pre-enrolled-keys=1,size=4M",
    "tpmstate0": "local-lvm:vm-100-disk-1,size=4M,version=v2.0",
    "scsi0": "local-lvm:vm-100-disk-2,iothread=1,size=32G,ssd=1",
    "scsi10": "local:100/vm-100-disk-4.qcow2,size=1T",
    "virtio1": "ceph:vm-100-disk-3,size=512M",
    "ide0": "local-lvm:vm-100-cloudinit,media=cdrom",
    "ide2": "local:iso/debian.iso,media=cdrom,size=600M",
    "sata0": "none,media=cdrom",
    "net0": "virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1,tag=7",
    "net1": "model=e1000,macaddr=BC:24:11:00:00:02,bridge=vmbr1,link_down=1",
    "hostpci0": "0000:01:00,pcie=1",
    "usb0": "host=1234:5678",
    "unused0": "local-lvm:vm-100-disk-9",
}


def read(config: dict[str, Any], status: dict[str, Any] | None = None, **more: Any) -> VmManifest:
    return manifest(Seen("100", {"node": "pve1", "vmid": 100}, config, RUNS if status is None else status, **more))


@pytest.mark.parametrize(
    ("written", "serial"),
    [
        ("uuid=6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11", None),
        ("serial=CZ 1234", "CZ 1234"),
        ("serial=Q1ogMTIzNA==,base64=1", "CZ 1234"),
        ("serial=CZ 1234,base64=1", None),
        ("serial=Cg==,base64=1", None),
    ],
)
def test_the_serial_number_is_read_from_what_the_firmware_shows(written: str, serial: str | None) -> None:
    assert read(FULL | {"smbios1": written}).serial == serial


def test_all_that_makes_hardware_is_read() -> None:
    vm = read(FULL, volumes={"local-lvm:vm-100-disk-2": Volume(32 * GIB + MIB, 5 * GIB, "raw")})
    assert (vm.name, vm.host, vm.firmware, vm.secure_boot, vm.tpm) == ("web", "pve1", "uefi", True, True)
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes) == (8, 4, 4 * GIB)
    assert (vm.guest_os.family, vm.uuid) == ("windows", "6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11")
    disks = [(disk.key, disk.bus, disk.unit, disk.boot_order, disk.format, disk.controller) for disk in vm.disks]
    assert disks == [
        ("scsi0", "scsi", 0, 2, "raw", "virtio-scsi-single"),
        ("scsi10", "scsi", 10, None, "qcow2", "virtio-scsi-single"),
        ("virtio1", "virtio", 1, 1, "raw", ""),
    ]
    # The storage's word counts more than the configuration's.
    assert [disk.capacity_bytes for disk in vm.disks] == [32 * GIB + MIB, 1024 * GIB, 512 * MIB]
    assert [disk.used_bytes for disk in vm.disks] == [5 * GIB, None, None]
    nics = [(nic.key, nic.mac, nic.model, nic.network, nic.connected) for nic in vm.nics]
    assert nics == [
        ("net0", "bc:24:11:00:00:01", "virtio", "vmbr0.7", True),
        ("net1", "bc:24:11:00:00:02", "e1000", "vmbr1", False),
    ]
    assert {concern.id for concern in vm.concerns} == {
        *("host-devices", "cloud-init", "unused-volumes", "pve.read_by"),
        *("ballooning", "network-rules", "settings-not-taken-over", "media-left-out"),
    }
    assert vm.cbt_available


def test_a_disk_of_uefi_variables_makes_no_secure_boot_of_a_bios() -> None:
    """It stays in the configuration when the firmware is changed back."""
    vm = read({**FULL, "bios": "seabios"})
    assert (vm.firmware, vm.secure_boot) == ("bios", False)


def test_an_io_thread_needs_a_newer_qemu() -> None:
    """QEMU 7.2.22 ended with «nbd_blockdev_client_closed: Assertion» where such a disk was read."""
    vm = read(FULL, {**RUNS, "running-qemu": "8.1.5"})
    assert "I/O thread" in str(vm.cbt_reason)
    assert [disk.key for disk in vm.disks if disk.cbt_reason] == ["scsi0"]
    assert vm.cbt_reason_without(["scsi0"]) is None


@pytest.mark.parametrize(
    ("status", "power", "concern"),
    [
        ({"status": "stopped"}, "off", None),
        ({"status": "stopped", "lock": "suspended"}, "suspended", "saved-memory"),
        ({"status": "running", "qmpstatus": "paused"}, "suspended", "suspended"),
        ({"status": "running", "qmpstatus": "running", "lock": "backup"}, "on", "locked"),
        ({"status": "running", "ha": {"managed": 1, "state": "started"}}, "on", "ha"),
        ({"status": "running", "running-qemu": "6.2.0"}, "on", None),
        ({}, "unknown", None),
    ],
)
def test_what_it_is_doing_now(status: dict[str, Any], power: str, concern: str | None) -> None:
    vm = read({"name": "x", "scsi0": "a:b,size=1G"}, status)
    assert vm.power_state == power
    assert [one.id for one in vm.concerns if one.id != "pve.read_by"] == ([concern] if concern else [])
    assert vm.cbt_available == (concern in ("locked", "ha"))


@pytest.mark.parametrize(
    ("config", "concern"),
    [
        ({"scsi0": "/dev/disk/by-id/x,size=1G"}, "disk-passed-through:scsi0"),
        ({"scsi0": "a:b"}, "disk-unknown-size:scsi0"),
        ({"template": 1}, "template"),
        ({"args": "-device x"}, "qemu-arguments"),
        ({"virtiofs0": "share"}, "shared-folders"),
        ({"cpu": "custom-mine,flags=+aes"}, "custom-cpu"),
        ({"arch": "aarch64"}, "other-processor"),
        ({"amd-sev": "type=snp"}, "encrypted-memory"),
        ({"hookscript": "local:snippets/x.pl"}, "hook-script"),
        ({"memory": "2048", "balloon": 512}, "ballooning"),
        ({"net0": "virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1"}, "network-rules"),
        ({"numa": 1, "numa0": "cpus=0-1,memory=512"}, "settings-not-taken-over"),
        ({"audio0": "device=ich9-intel-hda"}, "settings-not-taken-over"),
        ({"warp-drive": 1}, "settings-unknown"),
        ({"scsi0": "a:b,size=1G,snapshot=1"}, "disk-forgets:scsi0"),
        ({"scsi0": "a:b,size=1G,serial=X%20%C3%A4"}, "disk-number:scsi0"),
        ({"scsi0": "a:b,size=1G,wwn=0x5000c50015ea71aa"}, "disk-number:scsi0"),
    ],
)
def test_concerns(config: dict[str, Any], concern: str) -> None:
    assert concern in {one.id for one in read(config).concerns}


@pytest.mark.parametrize(
    ("machine", "chipset"),
    [
        ({}, "pc"),
        ({"machine": "pc-i440fx-9.0"}, "pc"),
        ({"machine": "q35"}, "q35"),
        ({"machine": "type=pc-q35-9.0,viommu=intel"}, "q35"),
        ({"machine": "viommu=virtio"}, "pc"),
        ({"machine": "virt"}, None),
    ],
)
def test_the_chipset_is_read(machine: dict[str, Any], chipset: str | None) -> None:
    assert read(machine).chipset == chipset


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ["ens18", "ens23", None]),
        ({"machine": "q35"}, ["enp6s18", "enp6s23", None]),
        ({"machine": "pc-q35-3.1", "hostpci3": "0000:01:00"}, ["enp6s18", "enp6s23", None]),
        ({"machine": "q35", "hostpci4": "0000:01:00"}, [None] * 3),
        ({"machine": "virt"}, [None] * 3),
    ],
)
def test_cards_are_where_proxmox_ve_puts_them(config: dict[str, str], names: list[str | None]) -> None:
    cards = {f"net{number}": f"virtio=BC:24:11:00:00:0{number},bridge=vmbr0" for number in (0, 5, 6)}
    assert [nic.linux_name for nic in read({**cards, **config}).nics] == names


@pytest.mark.parametrize(
    ("drive", "serial"),
    [
        ({"virtio0": "a:b,size=1G,serial=DATA%2D01"}, "DATA-01"),
        ({"scsi3": "a:b,size=1G,serial=DATA01"}, "DATA01"),
        ({"scsi3": "a:b,size=1G"}, "drive-scsi3"),
        ({"virtio0": "a:b,size=1G"}, None),
        ({"sata0": "a:b,size=1G,serial=X%20%C3%A4"}, None),
    ],
)
def test_a_disk_keeps_the_serial_number_that_its_guest_reads(drive: dict[str, Any], serial: str | None) -> None:
    """`scsi-0QEMU_QEMU_HARDDISK_drive-scsi3` is one without a serial number in a guest's /dev/disk/by-id."""
    found = read(drive)
    assert [disk.serial for disk in found.disks] == [serial]
    assert any(one.id.startswith("disk-number") for one in found.concerns) == ("%20" in str(drive))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"smbios1": "uuid=6d6f7665-6d65-4d6f-8f76-656d656d6f76,base64=1,serial=T0VN,product=UA=="},
            "smbios1 product",
        ),
        ({"scsi0": "a:b,size=1G,ro=1,iops_rd=100,mbps=5"}, "ro of scsi0, limits of scsi0"),
        ({"net0": "virtio=BC:24:11:00:00:01,bridge=vmbr0,trunks=5;6,rate=10"}, "trunks of net0, rate of net0"),
        ({"ostype": "win10", "localtime": 0}, "localtime=0"),
        ({"ostype": "l26", "localtime": 1}, "localtime=1"),
        ({"cpu": "x86-64-v2,flags=-pcid,hidden=1"}, "cpu flags, cpu hidden"),
        ({"tpmstate0": "a:t,size=4M,version=v1.2"}, "TPM version 1.2"),
    ],
)
def test_parts_of_settings_that_it_does_not_have_here_are_named(config: dict[str, Any], named: str) -> None:
    """SMBIOS values are what licences of a maker ask for; a disk that may only be read can be written here."""
    (found,) = [one for one in read(config).concerns if one.id == "settings-not-taken-over"]
    assert found.assessment == f"it has settings that it does not have here: {named}"


def test_settings_that_it_has_here_too_are_not_named() -> None:
    config = {
        "smbios1": "uuid=6d6f7665-6d65-4d6f-8f76-656d656d6f76",
        "scsi0": "a:b,size=1G,ro=0,ssd=1,cache=none",
        "net0": "virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=7",
        "cpu": "host",
        "tpmstate0": "a:t,size=4M,version=v2.0",
    }
    for clock in ({"ostype": "win10", "localtime": 1}, {"ostype": "l26", "localtime": 0}):
        assert "settings-not-taken-over" not in {one.id for one in read(config | clock).concerns}


def test_a_disc_in_a_drive_is_said_not_to_be_copied() -> None:
    drives = {
        "ide0": "none,media=cdrom",
        "ide1": "a:vm-1-cloudinit,media=cdrom",
        "ide2": "local:iso/setup.iso,media=cdrom,size=1G",
    }
    (found,) = [one for one in read(drives).concerns if one.id == "media-left-out"]
    assert "has setup.iso in a CD-ROM" in found.assessment


def test_each_key_of_the_vendors_schema_is_read_or_reported_or_left_out_for_a_reason() -> None:
    methods = schema.loaded()["paths"]["/nodes/{node}/qemu/{vmid}/config"]
    keys_of_all = {*methods["POST"]["params"], *methods["GET"].get("returns", {}).get("properties", {})}
    assert {key for key in keys_of_all if keys.kind(key) not in keys._ALL} == set()
    groups = (keys.IN_MANIFEST, keys.WITH_CONCERN, keys.NOT_TAKEN_OVER, keys._NO_ACCOUNT)
    assert sum(map(len, groups)) == len(keys._ALL)  # none is in two


def test_what_is_off_and_what_is_replicated() -> None:
    config = {"name": "x", "scsi0": "san:b,size=1G", "numa": 0, "memory": "512", "balloon": 0}
    vm = read(config, storages={"san": "iscsidirect"}, replicated_to=["pve2"])
    found = {one.id: one for one in vm.concerns}
    assert set(found) == {"disk-storage:scsi0", "replication", "pve.read_by"}
    assert found["disk-storage:scsi0"].category == "Critical"
    assert "pve2" in found["replication"].assessment


@pytest.mark.parametrize(
    ("agent", "may"), [("1", True), ("0", False), ("enabled=1,freeze-fs-on-backup=0", False), ("1,guest-fsfreeze=1", True)]
)
def test_who_may_be_frozen(agent: str, may: bool) -> None:
    assert settings.may_freeze({"agent": agent}) == may


def test_an_older_boot_order_is_read() -> None:
    config = {"boot": "cdn", "bootdisk": "virtio0", "virtio0": "a:b,size=1G"}
    assert settings.boot_order(config) == ["virtio0"]
    assert settings.boot_order({"boot": "n", "virtio0": "a:b"}) == []
    assert settings.boot_order({"boot": "order="}) == []


@pytest.mark.parametrize("text", ["", "virtio", "=,=", "a" * 9999, "virtio=,bridge=", "model=virtio"])
def test_odd_property_strings_raise_nothing(text: str) -> None:
    config = {"net0": text, "scsi0": text, "boot": text, "memory": text, "cores": text, "smbios1": text, "agent": text}
    assert read(config).cpu_count == 1


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_commands_are_these() -> None:
    assert argv("path", volume="local-lvm:vm-100-disk-0") == ["pvesm", "path", "local-lvm:vm-100-disk-0"]
    assert argv("remove", files=["/a/b", "/a/c"]) == ["rm", "-f", "/a/b", "/a/c"]


# What PVE::Storage's plugins say of a volume (`pvesm path`), and what qemu-nbd is given.
CEPH = "rbd:pool/vm-100-disk-0"
PATHS = {
    "/var/lib/vz/images/100/vm-100-disk-0.qcow2": None,
    "/dev/zvol/rpool/data/vm-100-disk-0": None,
    "/dev/pve/vm-100-disk-0": None,
    "/dev/rbd-pve/1b2c4d5e-0000-4000-8000-000000000000/pool/vm-100-disk-0": None,
    f"{CEPH}:conf=/etc/pve/ceph.conf:id=admin:keyring=/etc/pve/priv/ceph/pool.keyring": None,
    f"{CEPH}:mon_host=10.0.0.1;10.0.0.2:auth_supported=cephx:id=admin:keyring=/etc/pve/priv/ceph/away.keyring":
    f"{CEPH}:mon_host=10.0.0.1,10.0.0.2:auth_supported=cephx:id=admin:keyring=/etc/pve/priv/ceph/away.keyring",
}  # fmt: skip


@pytest.mark.parametrize(("path", "given"), PATHS.items())
def test_volumes_of_each_storage_are_served_at_the_paths_that_their_nodes_say(path: str, given: str | None) -> None:
    words = argv("serve", image=image(path, "store:vm-100-disk-0"), format="raw", export="e", file="/x/e")
    assert words[0] == "qemu-nbd"
    assert "--read-only" in words
    assert words[-1] == (given or path)


@pytest.mark.parametrize("monitors", ["10.0.0.1\\:6789", "[fd00\\:\\:1]", "$(reboot)"])
def test_what_a_shell_might_read_is_refused_with_a_way_out(monitors: str) -> None:
    with pytest.raises(SnapshotFailed, match="not passed to a shell") as failure:
        image(f"{CEPH}:mon_host={monitors}:auth_supported=none", "store:vm-100-disk-0")
    assert "without ports" in (failure.value.hint or "")


@pytest.mark.parametrize(
    ("command", "gaps"),
    [
        ("path", {"volume": "a:b; reboot"}),
        ("path", {"volume": "-x:y"}),
        ("path", {"volume": "a:$(id)"}),
        ("path", {"volume": "a:b\nreboot"}),
        ("overlay", {"file": "/x/../etc/passwd", "bytes": "1"}),
        ("remove", {"files": ["/x/a b"]}),
        ("serve", {"image": "json:{}", "format": "raw", "export": "e", "file": "/x/e"}),
        ("serve", {"image": "/x", "format": "vvfat", "export": "e", "file": "/x/e"}),
    ],
)
def test_nothing_odd_gets_into_a_command(command: str, gaps: dict[str, Any]) -> None:
    with pytest.raises(Internal, match="odd"):
        argv(command, **gaps)
