"""A definition that somebody else wrote: what names a program, a file or a device of this host never gets in, and is listed."""

import re
from xml.etree import ElementTree as ET

import pytest
from defusedxml import ElementTree

from synvirt.kvm import numbered_ports
from synvirt.kvm.foreign_domain import Rebuilt, rebuilt

QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
# Where libvirt's language reaches the host: (below <domain>, below <devices>).
REACHING = {
    "emulator": ("", "<emulator>/evil/run</emulator>"),
    "kernel": ("<os><type>hvm</type><kernel>/evil/k</kernel><initrd>/evil/i</initrd><cmdline>evil</cmdline></os>", ""),
    "dtb": ("<os><type>hvm</type><dtb>/evil/d</dtb></os>", ""),
    "loader": ("<os><type>hvm</type><loader type='pflash'>/evil/l</loader><nvram template='/evil/t'>/evil/n</nvram></os>", ""),
    "nvram source": ("<os><nvram type='file'><source file='/evil/n'/></nvram></os>", ""),
    "acpi table": ("<os><type>hvm</type><acpi><table type='slic'>/evil/t</table></acpi></os>", ""),
    "container init": ("<os><type>exe</type><init>/evil/init</init></os>", ""),
    "bootloader": ("<bootloader>/evil/pygrub</bootloader>", ""),
    "qemu arguments": ("<qemu:commandline><qemu:arg value='-evil'/></qemu:commandline>", ""),
    "qemu override": ("<qemu:override><qemu:device alias='evil'><qemu:frontend/></qemu:device></qemu:override>", ""),
    "firmware config": ("<sysinfo type='fwcfg'><entry name='opt/x' file='/evil/f'/></sysinfo>", ""),
    "no confinement": ("<seclabel type='none' model='evil'/>", ""),
    "core dump": ("<on_crash>coredump-evil</on_crash>", ""),
    "cgroup": ("<resource><partition>/evil</partition></resource>", ""),
    "memory in a file": ("<memoryBacking><source type='file'/><evil/></memoryBacking>", ""),
    "launch security": ("<launchSecurity type='sev'><session>evil</session></launchSecurity>", ""),
    "folder": ("", "<filesystem type='mount'><source dir='/evil'/><target dir='e'/></filesystem>"),
    "virtiofs": ("", "<filesystem type='mount'><binary path='/evil/fs'/><source socket='/evil/s'/></filesystem>"),
    "passthrough": ("", "<hostdev mode='subsystem' type='pci'><source><address bus='evil'/></source></hostdev>"),
    "scsi passthrough": ("", "<disk type='block' device='lun'><source dev='/evil/d'/><target dev='sda'/></disk>"),
    "disc": ("", "<disk type='file' device='cdrom'><source file='/evil/shadow'/><target dev='sda'/></disk>"),
    "disk": ("", "<disk type='file'><source file='/evil/shadow'/><target dev='vda'/></disk>"),
    "disk of a chain": ("", "<disk type='file'><backingStore type='file'><source file='/evil/b'/></backingStore></disk>"),
    "vhost disk": ("", "<disk type='vhostuser'><source type='unix' path='/evil/s'/><target dev='vda'/></disk>"),
    "disk driver": ("", "<disk type='file'><driver name='evil' metadata_cache='/evil'/><target dev='vda'/></disk>"),
    "script": ("", "<interface type='ethernet'><script path='/evil/s'/><mac address='52:54:00:00:00:01'/></interface>"),
    "card's rom": ("", "<interface type='user'><rom file='/evil/rom'/></interface>"),
    "card's backend": ("", "<interface type='user'><backend type='passt' logFile='/evil/log'/></interface>"),
    "card's tap": ("", "<interface type='bridge'><source bridge='b'/><backend tap='/evil/t' vhost='/evil/v'/></interface>"),
    "vhost card": ("", "<interface type='vhostuser'><source type='unix' path='/evil/s' mode='server'/></interface>"),
    "passed card": ("", "<interface type='direct'><source dev='evil0' mode='passthrough'/></interface>"),
    "log": ("", "<serial type='pty'><log file='/evil/log' append='on'/></serial>"),
    "serial to a file": ("", "<serial type='file'><source path='/evil/f' append='on'/></serial>"),
    "serial of a device": ("", "<console type='dev'><source path='/evil/tty'/></console>"),
    "serial to a host": ("", "<serial type='tcp'><source mode='connect' host='evil' service='1'/></serial>"),
    "parallel": ("", "<parallel type='dev'><source path='/evil/lp'/></parallel>"),
    "channel that connects": (
        "",
        "<channel type='unix'><source path='/evil/s'/><target type='virtio'/></channel>",
    ),
    "channel to a pipe": ("", "<channel type='pipe'><source path='/evil/p'/><target type='virtio' name='n'/></channel>"),
    "channel to the host": ("", "<channel type='unix'><target type='guestfwd' address='evil' port='1'/></channel>"),
    "render node": ("", "<graphics type='spice'><gl enable='yes' rendernode='/evil/r'/></graphics>"),
    "local screen": ("", "<graphics type='sdl' display=':0' xauth='/evil/x'/>"),
    "screen's socket": ("", "<graphics type='vnc' socket='/evil/s'><listen type='socket' socket='/evil/s'/></graphics>"),
    "vhost video": ("", "<video><driver name='evil' /><model type='virtio'/></video>"),
    "entropy": ("", "<rng model='virtio'><backend model='random'>/evil/dev</backend></rng>"),
    "entropy daemon": (
        "",
        "<rng model='virtio'><backend model='egd' type='tcp'><source host='evil' mode='connect'/></backend></rng>",
    ),
    "tpm passthrough": ("", "<tpm model='tpm-tis'><backend type='passthrough'><device path='/evil/t'/></backend></tpm>"),
    "tpm state": ("", "<tpm model='tpm-crb'><backend type='emulator'><source type='dir' path='/evil/t'/></backend></tpm>"),
    "nvdimm": ("", "<memory model='nvdimm'><source><path>/evil/n</path></source><target><size>1</size></target></memory>"),
    "evdev": ("", "<input type='evdev'><source dev='/evil/e'/></input>"),
    "input passthrough": ("", "<input type='passthrough' bus='virtio'><source evdev='/evil/e'/></input>"),
    "shared memory": ("", "<shmem name='evil'><model type='ivshmem-doorbell'/><server path='/evil/s'/></shmem>"),
    "smartcard": ("", "<smartcard mode='host-certificates'><database>/evil/db</database></smartcard>"),
    "usb redirection": ("", "<redirdev bus='usb' type='tcp'><source mode='connect' host='evil' service='1'/></redirdev>"),
    "vsock": ("", "<vsock model='virtio'><cid auto='no' address='3'/><evil/></vsock>"),
    "crypto": ("", "<crypto model='virtio' type='qemu'><backend model='lkcf'/><evil/></crypto>"),
    "lease": ("", "<lease><lockspace>evil</lockspace><target path='/evil/l'/></lease>"),
    "sound to a file": ("", "<audio id='1' type='file' path='/evil/a'/>"),
    "watchdog": ("", "<watchdog model='i6300esb' action='inject-evil'/>"),
    "processor": ("<cpu mode='custom'><model>/evil</model></cpu>", ""),
    "our mark": ("<metadata><s:job xmlns:s='https://synvirt.org/xmlns/job/1' id='evil'/></metadata>", ""),
    "what is not known yet": ("<new><file>/evil</file></new>", "<newer path='/evil'/>"),
}
# Its absence needs no warning: libvirt makes it up again, or the disk is placed by the restore, or our mark is renewed.
SILENT = {
    *("log", "cgroup", "no confinement", "loader", "disk", "disk of a chain", "vhost disk", "screen's socket", "our mark"),
    "channel that connects",
}


def of(top: str, devices: str) -> str:
    return f"<domain type='kvm' {QEMU}><name>n</name>{top}<devices>{devices}</devices></domain>"


def rebuild(xml: str, own: str | None = None) -> Rebuilt:
    return rebuilt(ElementTree.fromstring(xml), None if own is None else ElementTree.fromstring(own))


@pytest.mark.parametrize("name", REACHING)
def test_what_reaches_into_the_host_is_left_out_and_listed(name: str) -> None:
    found = rebuild(of(*REACHING[name]))
    assert "evil" not in ET.tostring(found.root, encoding="unicode")
    assert bool(found.left_out) is (name not in SILENT), found.left_out


@pytest.mark.parametrize("name", REACHING)
def test_no_path_gets_in(name: str) -> None:
    written = ET.tostring(rebuild(of(*REACHING[name])).root, encoding="unicode")
    assert re.findall(r"[\"'>](/[^\"'<]*)", written) == []


@pytest.mark.parametrize("name", sorted(REACHING.keys() - {"our mark"}))
def test_what_this_host_has_itself_stays(name: str) -> None:
    xml = of(*REACHING[name])
    found = rebuild(xml, own=xml)
    assert found.left_out == () or name in ("core dump", "disc"), found.left_out
    assert "evil" in ET.tostring(found.root, encoding="unicode")


ORDINARY = """<domain type="kvm"><name>web</name><uuid>u</uuid><title>The web/shop</title><metadata>
<o:x xmlns:o="https://o/">k</o:x></metadata>
<memory unit="KiB">1024</memory><currentMemory unit="KiB">1024</currentMemory>
<vcpu placement="static" cpuset="0-3">2</vcpu>
<cputune><vcpupin vcpu="0" cpuset="1" /><shares>2048</shares></cputune>
<os firmware="efi"><type arch="x86_64" machine="pc-q35-7.2">hvm</type><firmware>
<feature enabled="no" name="secure-boot" /></firmware>
<boot dev="hd" /></os><features><acpi /><apic /><hyperv mode="custom"><spinlocks state="on" retries="8191" />
</hyperv><smm state="on" /></features>
<cpu mode="custom" match="exact"><model fallback="forbid">Skylake-Server</model>
<topology sockets="1" dies="1" cores="2" threads="1" />
<feature policy="require" name="vmx" /></cpu><clock offset="utc"><timer name="rtc" tickpolicy="catchup" /></clock>
<on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>
<devices>
<disk type="file" device="disk"><driver name="qemu" type="qcow2" cache="none" io="native" discard="unmap" />
<target dev="vda" bus="virtio" />
<serial>A/1</serial><boot order="1" /><address type="pci" domain="0x0000" bus="0x04" slot="0x00" function="0x0" />
</disk>
<controller type="pci" index="1" model="pcie-root-port"><model name="pcie-root-port" />
<target chassis="1" port="0x10" /></controller>
<interface type="bridge"><mac address="52:54:00:00:00:01" /><source bridge="br0" /><vlan><tag id="7" /></vlan>
<model type="virtio" />
<filterref filter="clean-traffic"><parameter name="IP" value="10.0.0.1" /></filterref></interface>
<interface type="network"><mac address="52:54:00:00:00:02" /><source network="Servers 2" /><model type="e1000" />
</interface>
<serial type="pty"><target type="isa-serial" port="0"><model name="isa-serial" /></target></serial>
<console type="pty"><target type="serial" port="0" /></console>
<channel type="unix"><target type="virtio" name="org.qemu.guest_agent.0" /></channel><channel type="spicevmc">
<target type="virtio" name="com.redhat.spice.0" /></channel>
<input type="tablet" bus="usb" /><graphics type="spice" autoport="yes"><listen type="address" address="127.0.0.1" />
</graphics>
<sound model="ich9" /><audio id="1" type="spice" /><video>
<model type="qxl" ram="65536" vram="65536" heads="1" primary="yes" /></video>
<redirdev bus="usb" type="spicevmc" /><watchdog model="itco" action="reset" /><memballoon model="virtio">
<stats period="5" /></memballoon>
<rng model="virtio"><backend model="random">/dev/urandom</backend></rng><tpm model="tpm-crb">
<backend type="emulator" version="2.0" /></tpm>
<panic model="isa" /></devices></domain>"""


def test_an_ordinary_guest_is_taken_over_whole() -> None:
    found = rebuild(ORDINARY)
    assert found.left_out == ()
    taken = ET.tostring(found.root, encoding="unicode")
    assert _canonical(taken) == _canonical(ORDINARY)


@pytest.mark.parametrize(
    ("zone", "kept"), [("Europe/Berlin", True), ("Etc/GMT+5", True), (":/evil", False), ("../evil", False)]
)
def test_the_time_zone_of_a_clock_is_a_name(zone: str, kept: bool) -> None:
    """QEMU gets it as TZ, whose values may be files."""
    found = rebuild(of(f"<clock offset='timezone' timezone='{zone}'/>", ""))
    clock = found.root.find("clock")
    assert clock is not None
    assert (clock.get("timezone"), found.left_out == ()) == ((zone, True) if kept else (None, False))


def _canonical(xml: str) -> str:
    return ET.canonicalize(xml, strip_text=True, rewrite_prefixes=True)


def numbered(*numbers: int, evil: str = "") -> str:
    """A definition with ports that have numbers."""
    root = ET.Element("domain", type="kvm")
    devices = ET.SubElement(root, "devices")
    for number in numbers:
        port = ET.SubElement(devices, "controller", type="pci", index=str(number), model="pcie-root-port")
        ET.SubElement(port, "alias", name=numbered_ports.alias(number))
    numbered_ports.add(root, numbers)
    return ET.tostring(root, encoding="unicode").replace("</qemu:commandline>", f"{evil}</qemu:commandline>")


def test_ports_keep_their_numbers() -> None:
    """A Linux names its network cards by them."""
    found = rebuilt(ElementTree.fromstring(numbered(192, 224)))
    assert numbered_ports.numbers_in(found.root) == {192, 224}
    assert not found.left_out


def test_ports_keep_no_numbers_where_qemu_gets_anything_else() -> None:
    found = rebuilt(ElementTree.fromstring(numbered(192, evil="<qemu:arg value='-evil'/>")))
    assert "qemu" not in ET.tostring(found.root, encoding="unicode")
    assert [one.split()[0] for one in found.left_out] == ["commandline", "override"]
    other = numbered(192).replace('name="slot"', 'name="evil"')
    assert "evil" not in ET.tostring(rebuilt(ElementTree.fromstring(other)).root, encoding="unicode")
