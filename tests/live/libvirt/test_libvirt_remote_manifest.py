"""Domain XML as a VmManifest: what other hosts' domains look like, and what nobody's should."""

import re
from xml.etree import ElementTree as ET

import pytest

from synvirt.errors import Internal
from synvirt.hypervisor import Volume
from synvirt.hypervisor.domain_xml import build
from synvirt.kvm import numbered_ports
from synvirt.live.libvirt.manifest import DiskSize, Seen, backed_up_disks, manifest, parse, untracked
from synvirt.machines.concerns import LEFT_OUT
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Snapshot
from synvirt.sizes import GIB, MIB
from tests.contracts.hypervisors import job
from tests.fakes.hypervisor import HOST
from tests.kvm.test_foreign_domain import ORDINARY, REACHING, SILENT, of

DOMAIN = """\
<domain type='kvm' id='7'>
  <name>web 01</name>
  <uuid>6d6f7665-6d65-4d6f-8f76-656d656d6f76</uuid>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">
      <libosinfo:os id="{os}"/>
    </libosinfo:libosinfo>
  </metadata>
  <memory unit='GiB'>4</memory>
  <currentMemory unit='KiB'>2097152</currentMemory>
  <vcpu placement='static' current='2'>4</vcpu>
  <cpu><topology sockets='2' dies='1' cores='1' threads='2'/></cpu>
  <os firmware='efi'>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <loader readonly='yes' secure='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.ms.fd</loader>
    <boot dev='hd'/>
  </os>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/><source file='/images/web.qcow2' index='1'/>
      <target dev='vda' bus='virtio'/><address type='pci' bus='0x04'/>
    </disk>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw'/><source protocol='rbd' name='pool/data'/><target dev='sda' bus='scsi'/>
      <shareable/><boot order='2'/><address type='drive' controller='1' bus='0' target='0' unit='3'/>
    </disk>
    <disk type='block' device='lun'><source dev='/dev/sdz'/><target dev='sdb' bus='scsi'/></disk>
    <disk type='file' device='cdrom'><source file='/images/debian.iso'/><target dev='sdc' bus='sata'/><readonly/></disk>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/><target dev='sdd' bus='sata'/></disk>
    <interface type='bridge'>
      <mac address='52:54:00:AA:bb:cc'/><source bridge='br0'/><model type='virtio'/><link state='down'/>
    </interface>
    <interface type='network'><source network='default'/></interface>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>
    <hostdev mode='subsystem' type='pci'/>
    <tpm model='tpm-crb'/>
  </devices>
</domain>
"""
SIZES = {"vda": DiskSize(20 * GIB, GIB), "sda": DiskSize(MIB, MIB), "sdb": DiskSize(MIB, 0)}


def seen(**fields: object) -> Seen:
    return Seen(**{"sizes": SIZES, "power_state": "on", **fields})  # type: ignore[arg-type]


def test_a_domain_is_described_as_it_is() -> None:
    found = manifest(
        parse(DOMAIN.format(os="http://debian.org/debian/12")), seen(addresses={"52:54:00:aa:bb:cc": ("192.0.2.7",)})
    )
    assert (found.vm_id, found.name, found.power_state) == ("6d6f7665-6d65-4d6f-8f76-656d656d6f76", "web 01", "on")
    assert (found.firmware, found.secure_boot, found.tpm) == ("uefi", True, True)
    assert (found.cpu_count, found.cores_per_socket, found.memory_bytes) == (2, 2, 2 * GIB)  # those that it has now
    assert (found.guest_os.family, found.guest_os.name) == ("linux", "debian/12")
    assert [(disk.key, disk.bus, disk.format, disk.boot_order) for disk in found.disks] == [
        ("vda", "virtio", "qcow2", 1),
        ("sda", "scsi", "raw", 2),
        ("sdb", "scsi", "raw", None),
    ]
    assert [disk.source_path for disk in found.disks] == ["/images/web.qcow2", "pool/data", "/dev/sdz"]
    assert (found.disks[1].controller, found.disks[1].unit) == ("1", 3)
    assert [(nic.network, nic.connected, nic.ip_addresses) for nic in found.nics] == [
        ("br0", False, ("192.0.2.7",)),
        ("default", True, ()),
    ]
    assert not found.cbt_available
    assert "sda is raw" in str(found.cbt_reason)
    assert {(one.id, one.category) for one in found.concerns} == {
        ("disk-shared:sda", "Warning"),
        ("disk-passed-through:sdb", "Critical"),
        ("reaches-into-its-host", "Information"),
        ("host-devices", "Warning"),
        ("settings-not-taken-over", "Information"),
    }


@pytest.mark.parametrize(
    ("os", "uefi", "secure"),
    [
        ("<os firmware='efi'><firmware><feature enabled='yes' name='secure-boot'/></firmware></os>", True, True),
        ("<os firmware='efi'><firmware><feature enabled='no' name='secure-boot'/></firmware></os>", True, False),
        ("<os firmware='efi'><loader secure='yes'/></os>", True, True),
        ("<os firmware='efi'/>", True, False),
        ("<os><loader readonly='yes' type='pflash'>/fw/code.fd</loader></os>", True, False),
        ("<os><loader type='rom'>/usr/share/ovmf/OVMF.fd</loader></os>", True, False),
        ("<os><loader>/usr/share/edk2/x64/OVMF.4m.fd</loader></os>", True, False),
        ("<os><loader type='rom'>/usr/share/seabios/bios-256k.bin</loader></os>", False, False),
        ("<os firmware='bios'/>", False, False),
    ],
)
def test_the_firmware_is_the_one_that_libvirt_chooses(os: str, uefi: bool, secure: bool) -> None:
    """While a domain is off, libvirt before 9.2 names only what it chooses by: a guest with Secure Boot would get none here."""
    found = manifest(parse(f"<domain><name>n</name>{os}<devices/></domain>"), seen())
    assert (found.firmware, found.secure_boot) == ("uefi" if uefi else "bios", secure)


@pytest.mark.parametrize(
    ("machine", "chipset"),
    [("pc-i440fx-7.2", "pc"), ("pc", "pc"), ("pc-q35-7.2", "q35"), ("q35", "q35"), ("microvm", None), ("", None)],
)
def test_the_chipset_is_read(machine: str, chipset: str | None) -> None:
    kind = f"<os><type machine='{machine}'>hvm</type></os>"
    assert manifest(parse(f"<domain><name>n</name>{kind}<devices/></domain>"), seen()).chipset == chipset


def names(machine: str, address: str, others: str = "", after: str = "") -> list[str | None]:
    """What a Linux calls the card at that address."""
    card = f"<interface type='bridge'><source bridge='br0'/><address type='pci' {address}/></interface>"
    kind = f"<os><type machine='{machine}'>hvm</type></os>"
    xml = f"<domain {QEMU}><name>n</name>{kind}<devices>{others}{card}</devices>{after}</domain>"
    return [nic.linux_name for nic in manifest(parse(xml), seen()).nics]


QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"


@pytest.mark.parametrize(
    ("address", "older", "newer"),
    [
        ("domain='0x0000' bus='0x00' slot='0x12' function='0x0'", "ens18", "enp0s18"),
        ("domain='0x0000' bus='0x01' slot='0x12' function='0x0'", None, None),
        ("domain='0x0000' bus='0x00' slot='0x12' function='0x1'", None, None),
        ("domain='0x0000' bus='0x00' slot='many' function='0x0'", None, None),
        ("bus='nowhere' slot='0x12'", None, None),
    ],
)
def test_the_place_of_a_card_is_read(address: str, older: str | None, newer: str | None) -> None:
    assert names("pc-i440fx-7.2", address) == [older]
    assert names("q35", address) == [newer]
    assert names("microvm", address) == [None]


def port(index: int, slot: int, function: int, more: str = "", bus: str = "0x00", model: str = "pcie-root-port") -> str:
    place = f"<address type='pci' domain='0x0000' bus='{bus}' slot='{slot:#04x}' function='{function:#x}'/>"
    return f"<controller type='pci' index='{index}' model='{model}'>{more}{place}</controller>"


IN_PORT = "domain='0x0000' bus='0x07' slot='0x00' function='0x0'"
ROOT = "<controller type='pci' index='0' model='pcie-root'/>"


def test_buses_are_numbered_in_the_order_of_their_ports() -> None:
    """Not by the indexes in libvirt: this card's is 7, and Linux calls it enp2s0."""
    assert names("q35", IN_PORT, ROOT + port(7, 2, 1) + port(1, 2, 0) + port(2, 3, 0)) == ["enp2s0"]
    assert names("q35", IN_PORT, ROOT + port(1, 2, 0)) == [None], "it has no such port"


@pytest.mark.parametrize(
    "other",
    [
        port(2, 1, 0, model="pcie-to-pci-bridge"),
        port(2, 1, 0, bus="0x01"),
        "<controller type='pci' index='2' model='pcie-root-port'/>",
    ],
)
def test_behind_other_bridges_the_number_of_a_bus_is_not_known(other: str) -> None:
    assert names("q35", IN_PORT, ROOT + port(7, 2, 1) + other) == [None]


def test_a_card_keeps_the_number_of_its_port_when_it_moves_on() -> None:
    """Ours are known by their names, if QEMU gets the numbers as well."""
    domain = ET.Element("domain")
    numbered_ports.add(domain, [192])
    numbered = "".join(ET.tostring(child, encoding="unicode") for child in domain)
    ports = ROOT + port(7, 2, 1, more="<alias name='ua-slot-192'/>") + port(1, 2, 0)
    assert names("q35", IN_PORT, ports, numbered) == ["ens192"]
    assert names("q35", IN_PORT, ports) == ["enp2s0"]


def test_a_disk_keeps_the_serial_number_that_its_guest_reads() -> None:
    """`scsi-0QEMU_QEMU_HARDDISK_drive-scsi1-0-0-3` is one without a serial number in a guest's /dev/disk/by-id."""
    on_scsi = "<target dev='sda' bus='scsi'/><address type='drive' controller='1' bus='0' target='0' unit='3'/>"
    disks = (
        ("<serial>DATA-01</serial><target dev='vda' bus='virtio'/>", "DATA-01"),
        (f"<serial>DATA-01</serial>{on_scsi}", "DATA-01"),
        (on_scsi, "drive-scsi1-0-0-3"),
        ("<target dev='sda' bus='sata'/><address type='drive' controller='0' bus='0' target='0' unit='3'/>", None),
        ("<target dev='vda' bus='virtio'/><address type='pci' bus='0x04'/>", None),
    )
    for disk, serial in disks:
        domain = f"<domain><name>n</name><devices><disk type='file'><source file='/a'/>{disk}</disk></devices></domain>"
        found = manifest(parse(domain), seen())
        assert [one.serial for one in found.disks] == [serial]
        assert not [one.id for one in found.concerns if one.id.startswith("disk-number")]


def test_a_disk_that_cannot_change_is_not_tracked() -> None:
    """libvirt refuses a checkpoint of it: «is empty or readonly»."""
    disk = "<disk type='file'><driver type='qcow2'/><source file='/s'/><target dev='vda'/>{}</disk>"
    for mark, reported in (("", None), ("<readonly/>", "vda is read-only"), ("<transient/>", "vda is transient")):
        reasons = untracked(parse(f"<domain><devices>{disk.format(mark)}</devices></domain>"))
        assert reported in reasons["vda"] if reported else not reasons


@pytest.mark.parametrize(
    ("known", "reported", "family"),
    [
        ("http://microsoft.com/win/2k22", {}, "windows"),
        ("http://freebsd.org/freebsd/14", {}, "other"),
        ("http://microsoft.com/win/2k22", {"id": "debian", "pretty-name": "Debian"}, "linux"),
        ("http://debian.org/debian/12", {"id": "mswindows"}, "windows"),
        ("", {}, "other"),
    ],
)
def test_the_agent_knows_better_than_who_made_the_domain(known: str, reported: dict[str, str], family: str) -> None:
    assert manifest(parse(DOMAIN.format(os=known)), seen(guest=reported)).guest_os.family == family


@pytest.mark.parametrize(("order", "first"), [(1, "vdb"), (2, "vdb"), (None, "vda")])
def test_a_domain_with_an_order_of_boot_boots_from_the_disk_that_has_one(order: int | None, first: str) -> None:
    """libvirt takes the first disk only of a domain that has no order at all: one with an order does not boot from the rest."""
    boot = "" if order is None else f"<boot order='{order}'/>"
    xml = (
        "<domain><devices><disk type='file'><source file='/data'/><target dev='vda' bus='virtio'/></disk>"
        f"<disk type='file'><source file='/system'/><target dev='vdb' bus='virtio'/>{boot}</disk></devices></domain>"
    )
    found = manifest(parse(xml), seen()).disks
    assert min(found, key=lambda disk: (disk.boot_order is None, disk.boot_order)).key == first
    assert [disk.boot_order for disk in found] == ([1, None] if order is None else [None, order])


def test_a_disk_of_unknown_size_is_critical_and_may_be_left_out() -> None:
    found = manifest(parse(DOMAIN.format(os="")), seen(sizes={}))
    assert "disk-unknown-size:vda" in {one.id for one in found.concerns}


def test_the_hosts_own_devices_are_in_no_backup_and_hinder_no_other_disk() -> None:
    root = parse(DOMAIN.format(os=""))
    assert [key for key, _ in backed_up_disks(root)] == ["vda", "sda"]
    assert "device of its host" in untracked(root)["sdb"]
    assert not any("sdb" in reason for key, reason in untracked(root).items() if key != "sdb")


@pytest.mark.parametrize(
    "xml",
    [
        "",
        "<domain>",
        "<!DOCTYPE d [<!ENTITY a 'aaaa'>]><domain><name>&a;</name></domain>",
        "<!DOCTYPE d SYSTEM 'file:///etc/passwd'><domain/>",
    ],
)
def test_xml_that_libvirt_would_not_write_is_refused(xml: str) -> None:
    with pytest.raises(Internal, match="libvirt's XML"):
        parse(xml)


def test_xml_that_is_larger_than_libvirts_is_refused() -> None:
    with pytest.raises(Internal, match="libvirt's XML"):
        parse("<domain>" + " " * (5 << 20) + "</domain>")


@pytest.mark.parametrize(
    "xml",
    [
        "<domain/>",
        "<domain><devices><disk/><interface/><channel><target/></channel></devices></domain>",
        "<domain><vcpu>-5</vcpu><memory unit='PiB'>99999999999999999999</memory></domain>",
        "<domain><vcpu>1e9</vcpu><memory unit='furlong'>1</memory><cpu><topology cores='x'/></cpu></domain>",
    ],
)
def test_a_domain_that_says_little_is_described_nevertheless(xml: str) -> None:
    found = manifest(parse(xml), seen())
    assert found.cpu_count >= 1
    assert found.memory_bytes >= 0


# A disk, with a concern of its own.
OWN_WORDS = {"scsi passthrough"}


@pytest.mark.parametrize("name", sorted(REACHING))
def test_nothing_of_a_definition_that_reaches_into_its_host_gets_into_the_domain_made_here(name: str) -> None:
    """Emulators, loaders, kernels, devices, channels that connect …: all that a restore point may try, by a live source."""
    xml = of(*REACHING[name]).replace("<name>n</name>", "<name>n</name><memory>65536</memory><vcpu>1</vcpu>")
    found = manifest(parse(xml), seen())
    machine = machine_of(job(found))
    # A network that its cards were in is a name, which a plan maps; and no file or device of this host.
    volumes = [Volume(disk.key, f"/volumes/{disk.key}", "file") for disk in found.disks]
    made = build(machine, volumes, HOST)
    assert "evil" not in made.xml
    paths = {path for path in re.findall(r"[\"'>](/[^\"'<]*)", made.xml) if not path.startswith("/volumes/")}
    assert paths <= {HOST.serial_log.format(uuid=made.uuid), "/dev/urandom", *firmware()}
    reported = [one.source for one in made.differences if one.what == "what reaches into its host"]
    assert bool(reported) is (name not in OWN_WORDS | SILENT), reported


def firmware() -> set[str]:
    builds = [one for one in (HOST.uefi, HOST.uefi_secure) if one is not None]
    return {path for one in builds for path in (one.code, one.variables)}


def test_an_ordinary_definition_reaches_nowhere() -> None:
    found = manifest(parse(ORDINARY.replace("1024</memory>", "1048576</memory>")), seen())
    assert all(one.id != LEFT_OUT for one in found.concerns)


def test_of_a_thousand_things_that_reach_some_are_shown() -> None:
    many = "".join(f"<filesystem{number} type='mount'/>" for number in range(1000))
    (left_out,) = [one for one in manifest(parse(of("", many)), seen()).concerns if one.id == LEFT_OUT]
    assert left_out.assessment.endswith("; and 980 more")


def test_a_disk_that_is_attached_twice_is_one_disk() -> None:
    """A guest with two paths to it would have two disks here, and write to one of them, then to the other."""
    disk = "<disk type='block' device='disk'><source dev='/dev/vg/{}'/><target dev='{}' bus='scsi'/></disk>"
    disks = "".join(disk.format(*one) for one in (("data", "sda"), ("logs", "sdb"), ("data", "sdc")))
    found = manifest(parse(f"<domain><name>n</name><devices>{disks}</devices></domain>"), seen())
    twice = [(one.id, one.category) for one in found.concerns if one.id.startswith("disk-twice")]
    assert twice == [("disk-twice:sdc", "Critical")]


def test_sectors_that_a_disk_would_not_have_here_are_said() -> None:
    """Physical sectors are a hint for speed alone."""
    disk = "<disk type='file' device='disk'><source file='/{0}'/><target dev='{0}' bus='virtio'/>{1}</disk>"
    sizes = {
        "vda": "",
        "vdb": "<blockio logical_block_size='4096' physical_block_size='4096'/>",
        "vdc": "<blockio logical_block_size='512' physical_block_size='4096'/>",
        "vdd": "<blockio physical_block_size='4096'/>",
    }
    disks = "".join(disk.format(*one) for one in sizes.items())
    found = manifest(parse(f"<domain><name>n</name><devices>{disks}</devices></domain>"), seen())
    (sectors,) = [one for one in found.concerns if one.id.startswith("disk-sectors")]
    assert (sectors.id, sectors.category) == ("disk-sectors:vdb", "Critical")
    assert [disk.sector_bytes for disk in found.disks] == [512, 4096, 512, 512]
    assert "Disk vdb has sectors of 4096 bytes" in sectors.assessment


def test_a_guest_that_was_migrated_away_is_not_moved_from_here() -> None:
    found = manifest(parse("<domain><name>n</name><devices/></domain>"), Seen({}, "unknown"))
    assert [(one.id, one.category) for one in found.concerns] == [("elsewhere", "Critical")]


def test_a_guest_that_is_off_for_an_unknown_reason_is_moved_and_said_so() -> None:
    found = manifest(parse("<domain><name>n</name><devices/></domain>"), Seen({}, "off", why_off_unknown=True))
    assert [(one.id, one.category) for one in found.concerns] == [("off-unknown", "Information")]


def test_snapshots_are_said_not_to_be_imported() -> None:
    found = manifest(parse("<domain><name>n</name><devices/></domain>"), Seen({}, "on", snapshots=(Snapshot(id="s"),)))
    assert [one.assessment for one in found.concerns if one.id == "snapshots-present"] == [
        "The VM has 1 snapshot. Its current state alone is imported."
    ]


@pytest.mark.parametrize(("mode", "serial"), [("<smbios mode='sysinfo'/>", "OEM-7"), ("", None)])
def test_the_serial_number_is_that_of_sysinfo_where_the_guest_sees_it(mode: str, serial: str | None) -> None:
    sysinfo = "<sysinfo type='smbios'><system><entry name='serial'>OEM-7</entry></system></sysinfo>"
    found = manifest(parse(f"<domain><name>n</name><os>{mode}</os>{sysinfo}<devices/></domain>"), seen())
    assert found.serial == serial


def differences(top: str, devices: str = "", os: str = "") -> list[str]:
    """What a domain that is made of this one is said to lack of it."""
    xml = (
        f'<domain xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0"><name>n</name><memory>1048576</memory>'
        f'<metadata><libosinfo:os id="{os}"/></metadata>{top}<devices>{devices}</devices></domain>'
    )
    made = build(machine_of(job(manifest(parse(xml), seen()))), [], HOST)
    return [one.source for one in made.differences if one.what == "settings"]


SETTINGS = {
    "up to 4 processors": ("<vcpu current='2'>4</vcpu>", ""),
    "sysinfo system sku, sysinfo chassis asset": (
        (
            "<os><smbios mode='sysinfo'/></os><sysinfo type='smbios'><system><entry name='serial'>OEM-7</entry>"
            "<entry name='sku'>S</entry><entry name='uuid'>u</entry></system>"
            "<chassis><entry name='asset'>A</entry></chassis></sysinfo>"
        ),
        "",
    ),
    "the SMBIOS of its host": ("<os><smbios mode='host'/></os>", ""),
    "clock localtime": ("<clock offset='localtime'/>", ""),
    "clock timezone Europe/Berlin": ("<clock offset='timezone' timezone='Europe/Berlin'/>", ""),
    "clock variable utc 3600": ("<clock offset='variable' basis='utc' adjustment='3600'/>", ""),
    "memoryBacking": ("<memoryBacking><hugepages/></memoryBacking>", ""),
    "NUMA nodes": ("<cpu><numa><cell id='0' cpus='0' memory='1048576'/></numa></cpu>", ""),
    "cputune": ("<cputune><quota>10000</quota></cputune>", ""),
    "features kvm": ("<features><kvm><hidden state='on'/></kvm></features>", ""),
    "on_reboot destroy": ("<on_reboot>destroy</on_reboot>", ""),
    "iotune of disk vda": ("", "<disk type='file'><source file='/a'/><target dev='vda'/><iotune/></disk>"),
    "vlan of card 52:54:00:00:00:01, mtu of card 52:54:00:00:00:01": (
        "",
        "<interface type='bridge'><mac address='52:54:00:00:00:01'/><vlan><tag id='7'/></vlan><mtu size='9000'/></interface>",
    ),
    "watchdog i6300esb, sound ich9, video qxl, serial port 1, tpm version 1.2, channel of.mine": (
        "",
        (
            "<watchdog model='i6300esb' action='reset'/><sound model='ich9'/><video><model type='qxl'/></video>"
            "<serial type='pty'><target port='0'/></serial><serial type='pty'><target port='1'/></serial>"
            "<tpm model='tpm-tis'><backend type='emulator' version='1.2'/></tpm>"
            "<channel type='unix'><target type='virtio' name='of.mine'/></channel>"
        ),
    ),
}


@pytest.mark.parametrize("named", SETTINGS)
def test_what_the_domain_made_here_lacks_is_a_difference(named: str) -> None:
    top, devices = SETTINGS[named]
    xml = f"<domain><name>n</name>{top}<devices>{devices}</devices></domain>"
    (found,) = [one for one in manifest(parse(xml), seen()).concerns if one.id == "settings-not-taken-over"]
    assert found.assessment == f"The VM has settings that it does not have here: {named}."
    if "vda" not in devices:
        assert found.assessment in differences(top, devices)


def test_what_it_has_here_too_is_none() -> None:
    """As virt-install makes a guest; its clock by what it is."""
    usual = "<features><acpi/><apic/><hyperv mode='custom'/></features><pm/><on_reboot>restart</on_reboot><vcpu>2</vcpu>"
    devices = "<controller type='usb'/><serial type='pty'><target port='0'/></serial><memballoon model='virtio'/>"
    assert differences(f"{usual}<clock offset='utc'><timer name='rtc'/></clock>", devices) == []
    assert differences("<clock offset='variable' adjustment='0' basis='utc'/>") == []
    windows = "http://microsoft.com/win/2k22"
    assert differences("<clock offset='localtime'/>", os=windows) == []
    assert differences("<clock offset='utc'/>", os=windows) == ["The VM has settings that it does not have here: clock utc."]


@pytest.mark.parametrize(
    ("part", "concern"),
    [
        ("<serial>A 1</serial>", "disk-number:vda"),
        ("<wwn>5000c50015ea71aa</wwn>", "disk-number:vda"),
        ("<transient/>", "disk-forgets:vda"),
        ("<encryption format='luks'/>", "disk-decrypted:vda"),
    ],
)
def test_a_disk_that_is_another_one_here_is_said_to_be(part: str, concern: str) -> None:
    for where in ("{}<source file='/a'/>", "<source file='/a'>{}</source>")[: 2 if "encryption" in part else 1]:
        disk = f"<disk type='file'>{where.format(part)}<target dev='vda'/></disk>"
        found = manifest(parse(f"<domain><name>n</name><devices>{disk}</devices></domain>"), seen())
        assert [one.id for one in found.concerns if one.id.partition(":")[0] in concern] == [concern]
