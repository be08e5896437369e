"""A restore point's domain rewritten: what two machines cannot share, and what a boot test must not reach."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from defusedxml import ElementTree

from synvirt.backups.restores import domain as rewriting
from synvirt.backups.restores.domain import Place, Rewritten
from synvirt.errors import RepositoryDamaged
from synvirt.hypervisor import Early
from synvirt.kvm.identity import identity_of

OLD, NEW = UUID(int=1), UUID(int=2)
XML = f"""<domain type='kvm' id='7' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>old</name><uuid>{OLD}</uuid><genid>{OLD}</genid>
<metadata><synvirt:job xmlns:synvirt='https://synvirt.org/xmlns/job/1' id='{OLD}' bus='sata'/><o:x xmlns:o='https://o/'>kept</o:x></metadata>
<memory>1</memory>
<sysinfo type='smbios'><system><entry name='uuid'>{OLD}</entry><entry name='serial'>s</entry></system></sysinfo>
<os firmware='efi'><firmware><feature name='secure-boot' enabled='yes'/></firmware><loader>/fw/CODE.fd</loader>
<nvram template='/fw/VARS.fd' format='raw'>/var/old_VARS.fd</nvram></os>
<cpu mode='host-passthrough'><topology sockets='1' cores='4' threads='1'/><feature name='vmx'/></cpu>
<features><acpi/><hyperv><relaxed state='on'/></hyperv></features>
<devices><emulator>/usr/bin/qemu</emulator>
<disk type='block' device='disk'><driver name='qemu' type='raw' cache='none' io='native' discard='unmap'/>
<source dev='/dev/old'/><backingStore/><target dev='vda' bus='virtio'/><serial>s1</serial><boot order='1'/></disk>
<disk type='network'><auth username='u'><secret type='ceph' usage='x'/></auth><source protocol='rbd' name='p/i'/>
<target dev='vdb'/></disk>
<disk type='file'><source file='/elsewhere'/><target dev='vdc'/></disk>
<disk type='file' device='cdrom'><source file='/nowhere.iso'/><target dev='sda'/></disk>
<interface type='network'><mac address='52:54:00:00:00:01'/><source network='lan'/><model type='e1000'/>
<address type='pci' slot='0x5'/></interface>
<interface type='bridge'><mac address='52:54:00:00:00:02'/><source bridge='br7'/><filterref filter='f'/></interface>
<serial type='pty'><log file='/log/synvirt-{OLD}.log' append='on'/></serial>
<serial type='file'><log file='/log/theirs'/></serial>
<channel type='unix'><source mode='bind' path='/run/old'/><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
<graphics type='vnc' port='5905' tlsPort='5906' autoport='no' listen='0.0.0.0' socket='/run/old'/>
<hostdev type='pci' mode='subsystem'/>
<filesystem type='mount'><source dir='/srv'/><target dir='srv'/></filesystem></devices>
<seclabel type='dynamic' model='apparmor'><label>libvirt-{OLD}</label></seclabel>
<qemu:commandline><qemu:arg value='-netdev'/></qemu:commandline></domain>"""


LEFT_OUT = [
    "it runs by this host's own QEMU, not by /usr/bin/qemu",
    "devices/disk/auth is left out: it may reach into this host",
    "what was in its drive sda is left out: /nowhere.iso",
    "devices/serial@type=file is left out: it may reach into this host",
    "devices/hostdev of type pci is left out: it may reach into this host",
    "devices/filesystem of type mount is left out: it may reach into this host",
    "commandline is left out: it may reach into this host",
]


def domain() -> Rewritten:
    return rewriting.foreign(XML)


def mac(number: int) -> str:
    return f"52:54:00:aa:bb:0{number}"


def again(one: Rewritten) -> Any:
    """Read from what is written."""
    return ElementTree.fromstring(one.xml)


def test_another_machine_shares_nothing_with_the_first() -> None:
    one = domain()
    rewriting.renewed(one, name="new", run_id=NEW, mac=mac)
    found = again(one)
    assert str(OLD) not in one.xml
    assert (found.findtext("name"), found.findtext("uuid"), found.get("id")) == ("new", str(NEW), None)
    assert found.find("sysinfo/system/entry[@name='uuid']").text == str(NEW)
    assert found.find("sysinfo/system/entry[@name='serial']").text == "s"
    assert [one.get("address") for one in found.iterfind("devices/interface/mac")] == [mac(0), mac(1)]
    assert identity_of(one.xml).job_id == str(NEW)
    assert found.findtext("metadata/{https://o/}x") == "kept"
    assert found.find("genid").text is None
    assert found.find("devices/serial/log") is None
    rewriting.log_console(one, "/log/own")
    assert [dict(log.attrib) for log in again(one).iterfind("devices/serial/log")] == [{"file": "/log/own", "append": "on"}]
    assert found.find("devices/channel/source") is None
    graphics = found.find("devices/graphics")
    assert dict(graphics.attrib) == {"type": "vnc", "autoport": "yes", "listen": "0.0.0.0"}
    assert found.find("seclabel") is None
    assert found.find("devices/hostdev") is None
    assert one.differences == [*LEFT_OUT, "its vnc screen gets a port of its own, not 5905"]


def test_a_boot_test_reaches_nothing() -> None:
    one = domain()
    rewriting.renewed(one, name="new", run_id=NEW, mac=mac)
    rewriting.isolated(one, serial_log="/log/new")
    found = again(one)
    assert [(nic.get("type"), nic.find("link").get("state")) for nic in found.iterfind("devices/interface")] == [
        ("user", "down")
    ] * 2
    cards = found.findall("devices/interface")
    assert {child.tag for nic in cards for child in nic} == {"mac", "model", "address", "link", "rom"}
    for gone in ("hostdev", "filesystem"):
        assert found.find(f"devices/{gone}") is None
    assert "commandline" not in one.xml
    assert "/nowhere.iso" not in one.xml
    assert [channel.find("target").get("name") for channel in found.iterfind("devices/channel")] == [rewriting.AGENT]
    assert [log.get("file") for log in found.iterfind("devices/serial/log")] == ["/log/new"]
    assert [screen.find("listen").get("type") for screen in found.iterfind("devices/graphics")] == ["socket"]
    assert [found.findtext(event) for event in ("on_poweroff", "on_crash")] == ["destroy", "destroy"], "it is not started again"
    drive = found.find("devices/disk[@device='cdrom']")
    assert (drive.get("type"), [child.tag for child in drive]) == ("file", ["target"])


def test_a_boot_test_does_not_wait_for_a_network_that_the_guest_would_boot_from() -> None:
    xml = XML.replace("<boot order='1'/>", "<boot order='2'/>").replace("<source network='lan'/>", "<boot order='1'/>")
    one = rewriting.foreign(xml)
    rewriting.isolated(one, serial_log="/log/new")
    found = again(one)
    assert [nic.find("rom").get("enabled") for nic in found.iterfind("devices/interface")] == ["no", "no"]
    assert [boot.get("order") for boot in found.iterfind("devices/*/boot")] == ["2"]


def test_disks_lie_where_they_were_restored_to() -> None:
    one = domain()
    places = {"vda": Place("/new/vda.raw"), "vdb": Place("/dev/zvol/p/v", "block")}
    rewriting.with_disks(one, places, wanted=frozenset({"vda", "vdb", "vdc"}))
    found = again(one)
    first, second, drive = found.findall("devices/disk")
    assert (first.get("type"), first.find("source").get("file"), first.findtext("serial")) == ("file", "/new/vda.raw", "s1")
    assert dict(first.find("driver").attrib) == {"name": "qemu", "type": "raw", "discard": "unmap"}
    assert first.find("boot").get("order") == "1"
    assert first.find("backingStore") is None
    assert (second.get("type"), second.find("source").get("dev"), second.find("auth")) == ("block", "/dev/zvol/p/v", None)
    assert drive.find("source") is None
    assert one.differences == [*LEFT_OUT, "its disk vdc is left out: it is not part of the restore point"]


def test_a_console_that_was_not_written_to_a_file_is_not_now() -> None:
    one = rewriting.foreign("<domain><devices><serial type='pty'/></devices></domain>")
    rewriting.log_console(one, "/log/own")
    assert again(one).find("devices/serial/log") is None


def test_what_is_laid_over_a_disk_names_its_format() -> None:
    one = domain()
    rewriting.with_disks(one, {"vda": Place("/scratch/0.qcow2", format="qcow2")}, wanted=frozenset({"vda"}))
    assert again(one).find("devices/disk/driver").get("type") == "qcow2"


def test_a_disk_whose_copy_is_not_complete_lies_over_its_export() -> None:
    one = domain()
    early = Early(top="/top", between="/between", socket="/served")
    rewriting.with_disks(one, {"vda": Place("/dev/new", "block", early=early)}, wanted=frozenset({"vda"}))
    disk = again(one).find("devices/disk")
    assert (disk.get("type"), [each.get("type") for each in disk.findall("driver")]) == ("file", ["qcow2"])
    assert [disk.find("source").get("file"), disk.find("backingStore/source/host").get("socket")] == ["/top", "/served"]


def test_of_a_disk_of_this_guest_only_what_is_its_own_stays(tmp_path: Path) -> None:
    """In place, devices that are in this host's own definition of the guest stay word for word."""
    here = tmp_path / "here.iso"
    here.touch()
    xml = f"""<domain><devices>
<disk type='file'><source file='/old'/><mirror type='file'/><transient/><encryption format='luks'/><target dev='vda'/>
<serial>s</serial></disk>
<disk type='file' device='cdrom'><source file='{here}'/><target dev='sda'/></disk>
<disk type='block' device='cdrom'><source dev='/dev/gone'/><backingStore/><target dev='sdb'/></disk>
<disk type='file' device='floppy'><source file='/gone.img'/><target dev='fda'/></disk></devices></domain>"""
    one = rewriting.foreign(xml, rewriting.parsed(xml))
    assert rewriting.targets(one) == ["vda"]
    rewriting.with_disks(one, {"vda": Place("/new")}, wanted=frozenset({"vda"}))
    disk, there, gone, floppy = again(one).findall("devices/disk")
    assert [child.tag for child in disk] == ["driver", "target", "serial", "source"]
    assert there.find("source").get("file") == str(here)
    assert [(one.get("type"), [child.tag for child in one]) for one in (gone, floppy)] == [("file", ["target"])] * 2
    assert one.differences == [
        "what was in its drive sdb is not on this host: /dev/gone",
        "what was in its drive fda is not on this host: /gone.img",
    ]


def test_a_disk_may_lie_in_a_ceph_pool() -> None:
    one = domain()
    rewriting.with_disks(
        one, {"vda": Place("rbd:pool/image:id=synvirt:conf=/etc/ceph/c.conf", "rbd")}, wanted=frozenset({"vda"})
    )
    (disk, _) = again(one).findall("devices/disk")
    source = disk.find("source")
    assert (disk.get("type"), source.get("protocol"), source.get("name")) == ("network", "rbd", "pool/image")
    assert disk.find("auth").get("username") == "synvirt"
    assert one.differences[-2] == "its disk vdb is left out: it was not asked for"


def test_firmware_is_this_hosts_own() -> None:
    one = domain()
    assert (one.firmware, rewriting.has_uefi(one), "/fw/CODE.fd" in one.xml) == ("/fw/CODE.fd", True, False)
    rewriting.with_firmware(one, "/own/CODE.fd", "/kept.fd")
    found = again(one).find("os")
    assert (found.get("firmware"), found.find("firmware"), found.findtext("loader")) == (None, None, "/own/CODE.fd")
    assert dict(found.find("loader").attrib) == {"readonly": "yes", "type": "pflash"}
    assert not rewriting.wants_secure_boot(one)
    assert (dict(found.find("nvram").attrib), found.find("nvram").text) == ({"template": "/kept.fd"}, None)
    bios = rewriting.foreign("<domain><os><type>hvm</type><loader type='rom'>/evil</loader></os></domain>")
    assert not rewriting.has_uefi(bios)
    rewriting.without_firmware(bios)
    assert again(bios).find("os/loader") is None


CHOSEN = "<domain><name>web</name><os firmware='efi'><type>hvm</type>{}</os><devices/></domain>"
SECURE = "<firmware><feature enabled='yes' name='secure-boot'/></firmware><loader secure='yes'/>"


@pytest.mark.parametrize(("asks", "secure"), [("", None), (SECURE, "yes")])
def test_a_firmware_that_libvirt_chose_is_named_for_the_variables_of_the_point(asks: str, secure: str | None) -> None:
    """libvirt would begin with variables of its own."""
    one = rewriting.foreign(CHOSEN.format(asks))
    rewriting.name_firmware(one)
    assert (rewriting.has_uefi(one), rewriting.wants_secure_boot(one)) == (True, secure == "yes")
    rewriting.with_firmware(one, "/own/CODE.fd", "/kept.fd")
    found = again(one)
    assert (found.find("os").get("firmware"), found.find("os/firmware")) == (None, None)
    loader, nvram = found.find("os/loader"), found.find("os/nvram")
    assert (loader.text, loader.get("type"), loader.get("secure")) == ("/own/CODE.fd", "pflash", secure)
    assert (nvram.get("template"), nvram.text) == ("/kept.fd", None)
    assert (found.find("features/smm[@state='on']") is not None) is (secure == "yes")


def test_a_firmware_that_is_named_stays_as_it_is() -> None:
    for xml in (XML, CHOSEN.format("").replace(" firmware='efi'", "")):
        one, other = rewriting.foreign(xml), rewriting.foreign(xml)
        rewriting.name_firmware(one)
        assert one.xml == other.xml


def test_the_variables_of_this_guest_are_not_taken_for_those_of_another_firmware() -> None:
    """In place: its file stays, and its template is that of the firmware that it has now."""
    xml = "<domain><os><loader type='pflash'>/fw</loader><nvram template='/t' format='raw'>/var/now</nvram></os></domain>"
    now = rewriting.parsed(xml)
    one = rewriting.foreign("<domain><os><loader type='pflash'>/fw</loader><nvram/></os></domain>", now)
    rewriting.same_variables(one, now)
    nvram = again(one).find("os/nvram")
    assert (again(one).findtext("os/loader"), nvram.text, dict(nvram.attrib)) == ("/fw", "/var/now", {"template": "/t"})
    word_for_word = rewriting.foreign(xml, now)
    rewriting.with_firmware(word_for_word, "/own/CODE.fd", "/kept.fd")
    nvram = again(word_for_word).find("os/nvram")
    assert (nvram.text, dict(nvram.attrib)) == (None, {"template": "/kept.fd"})


@pytest.mark.parametrize(("choice", "left"), [("firmware='efi'", ["type", "nvram"]), ("", ["type"])])
def test_the_variables_of_a_firmware_that_libvirt_chooses_stay(choice: str, left: list[str]) -> None:
    one = rewriting.foreign(f"<domain><os {choice}><type>hvm</type><loader/><nvram/></os></domain>")
    rewriting.without_firmware(one)
    assert [child.tag for child in again(one).find("os")] == left


def test_without_kvm_it_is_emulated() -> None:
    one = domain()
    rewriting.emulated(one)
    found = again(one)
    assert (found.get("type"), found.find("cpu").get("mode"), found.find("cpu/topology").get("cores")) == (
        "qemu",
        "maximum",
        "4",
    )
    assert [dict(one.attrib) for one in found.findall("cpu/feature")] == [
        {"policy": "disable", "name": "erms"},
        {"policy": "disable", "name": "fsrm"},
    ], "none of the point's own"
    assert found.find("features/hyperv") is None
    assert "KVM" in one.differences[-1]
    translated = rewriting.foreign("<domain type='qemu'><cpu mode='custom'/></domain>")
    rewriting.emulated(translated)
    assert translated.differences == []
    assert again(translated).find("cpu").get("mode") == "custom", "it was emulated before"


def test_what_a_host_lacks_is_named() -> None:
    assert rewriting.lacking(domain(), bridges=lambda name: name == "br7", networks=lambda name: False) == [
        "the network lan of its network card 1"
    ]
    bridged = "<domain><devices><interface type='bridge'><source bridge='br7' network='lan'/></interface></devices></domain>"
    assert rewriting.lacking(rewriting.foreign(bridged), bridges=lambda name: True, networks=lambda name: False) == []


@pytest.mark.parametrize("xml", ["", "<domain", "<network/>", "<!DOCTYPE x [<!ENTITY a 'b'>]><domain>&a;</domain>"])
def test_what_is_no_domain_is_damage(xml: str) -> None:
    with pytest.raises(RepositoryDamaged):
        rewriting.parsed(xml)


def test_a_bare_domain_is_rewritten_too() -> None:
    one = rewriting.foreign("<domain/>")
    rewriting.renewed(one, name="new", run_id=NEW, mac=mac)
    rewriting.isolated(one, serial_log="/log/new")
    rewriting.with_disks(one, {}, wanted=frozenset())
    rewriting.without_firmware(one)
    rewriting.emulated(one)
    assert again(one).findtext("uuid") == str(NEW)
