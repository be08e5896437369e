"""A domain that is made of a stranger's description: of each importer and platform one that names an emulator, a kernel, a
loader, devices, files and arguments of QEMU. Nothing of it is in the domain, and what is left out is in its differences."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from synvirt.backups.restores import domain as restoring
from synvirt.hypervisor import Volume, domain_xml
from synvirt.hypervisor.domain_xml import Firmware, Host
from synvirt.hypervisor.machine import Machine
from synvirt.live.libvirt import manifest as libvirt_source
from synvirt.live.nutanix.machines import manifest as nutanix
from synvirt.live.nutanix.machines import of_central
from synvirt.live.nutanix.ways import Way as NutanixWay
from synvirt.live.proxmox.manifest import manifest as proxmox
from synvirt.live.proxmox.seen import Seen
from synvirt.machines import xenapi
from synvirt.machines.xenapi import Records
from synvirt.model.job import Domain
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.model.plan import Target
from synvirt.offline.hyperv.export import VmcxExport
from synvirt.offline.vbox import machine as vbox
from synvirt.offline.vmx import configuration as vmx
from synvirt.offline.xva import ova_xml
from synvirt.xml_document import parse
from tests.kvm.test_foreign_domain import REACHING
from tests.offline import appliances, vbox_machines
from tests.offline import parsing as ovf
from tests.offline.hyperv import hyperv_exports
from tests.offline.xva import ova_xml_text

ID = UUID(int=7)
UEFI = Firmware("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd")
# All that a domain of ours may name on this host, beside its volumes.
OURS = {UEFI.code, UEFI.variables, "/log/{uuid}.log", "/dev/urandom"}
EVIL = "/evil"


def vmx_source(folder: Path) -> VmManifest:
    text = (appliances.DESCRIPTIONS / "workstation.vmx").read_text()
    return vmx.parse(
        f"""{text}
serial0.present = "TRUE"
serial0.fileType = "file"
serial0.fileName = "{EVIL}/serial"
serial1.present = "FALSE"
serial1.fileName = "{EVIL}/absent"
parallel0.present = "TRUE"
parallel0.fileName = "{EVIL}/lp"
sharedFolder0.present = "TRUE"
sharedFolder0.hostPath = "{EVIL}/folder"
pciPassthru0.present = "TRUE"
bios440.filename = "{EVIL}/bios"
efi64.filename = "{EVIL}/loader"
vmx.binary = "{EVIL}/emulator"
monitor.args = "-kernel {EVIL}/kernel"
""".encode(),
        "web.vmx",
    ).manifest


def ovf_source(folder: Path) -> VmManifest:
    items = f"""<Item><rasd:Address>{EVIL}/tty</rasd:Address><rasd:ElementName>Serial 1</rasd:ElementName>
<rasd:InstanceID>91</rasd:InstanceID><rasd:ResourceType>21</rasd:ResourceType></Item>
<Item><rasd:ElementName>a GPU</rasd:ElementName><rasd:InstanceID>92</rasd:InstanceID>
<rasd:HostResource>{EVIL}/gpu</rasd:HostResource>
<rasd:ResourceSubType>vmware.pci.passthrough</rasd:ResourceSubType><rasd:ResourceType>1</rasd:ResourceType></Item>
<vmw:ExtraConfig ovf:required="false" vmw:key="serial0.fileName" vmw:value="{EVIL}/serial"/>
<vmw:ExtraConfig ovf:required="false" vmw:key="bios440.filename" vmw:value="{EVIL}/bios"/>
<vmw:ExtraConfig ovf:required="false" vmw:key="kernel" vmw:value="{EVIL}/kernel"/></VirtualHardwareSection>"""
    text = (appliances.DESCRIPTIONS / "ovftool.ovf").read_text()
    assert "xmlns:vmw" in text
    return ovf.parse(text.replace("</VirtualHardwareSection>", items).encode(), "web.ovf").manifest


def vbox_source(folder: Path) -> VmManifest:
    text = vbox_machines.MACHINE.decode()
    hardware = f"""<UART><Port slot="0" enabled="true" hostMode="RawFile" path="{EVIL}/serial"/></UART>
<LPT><Port slot="0" enabled="true" path="{EVIL}/lp"/></LPT>
<SharedFolders><SharedFolder name="all" hostPath="{EVIL}/folder" writable="true"/></SharedFolders>
<HostPci><Devices><Device host="{EVIL}/pci" guest="1"/></Devices></HostPci>
<Firmware type="EFI" path="{EVIL}/loader"/></Hardware>"""
    extra = f"""<ExtraData><ExtraDataItem name="VBoxInternal/Devices/pcbios/0/Config/BiosRom" value="{EVIL}/rom"/>
<ExtraDataItem name="GUI/LastCloseAction" value="{EVIL}"/></ExtraData></Machine>"""
    changed = text.replace("</Hardware>\n    <StorageControllers>", hardware + "<StorageControllers>")
    assert changed != text
    return vbox.parse(changed.replace("</Machine>", extra).encode(), "web.vbox").manifest


HOSTILE_XEN = {
    "PV_kernel": f"{EVIL}/kernel",
    "PV_ramdisk": f"{EVIL}/initrd",
    "PV_args": f"init={EVIL}/init",
    "PV_bootloader": f"{EVIL}/loader",
    "platform": {"device-model": f"{EVIL}/emulator", "qemu_args": f"-drive file={EVIL}/disk"},
    "other_config": {"pci": "0/0000:04:00.0", "qemu": f"{EVIL}/qemu"},
}


def xva_source(folder: Path) -> VmManifest:
    text = ova_xml_text.whole({"Ref:4": 1 << 20, "Ref:5": 1 << 20}, **HOSTILE_XEN)  # type: ignore[arg-type]
    return ova_xml.parse(parse(text, "ova.xml"), "ova.xml")


def xenserver_source(folder: Path) -> VmManifest:
    vm = {**ova_xml_text.vm(VBDs=["v"], VIFs=[]), **HOSTILE_XEN}
    records = Records(
        {"VM": {"r": vm}, "VBD": {"v": ova_xml_text.vbd("d", "0")}, "VDI": {"d": ova_xml_text.vdi(1 << 20, EVIL)}}
    )
    return xenapi.manifest(records, "r", disk_key=lambda reference, _: reference)


def hyperv_source(folder: Path, *, old: bool = False) -> VmManifest:
    made = hyperv_exports.configuration(
        {},
        drives={"ide0:0": hyperv_exports.drive("\\\\.\\PHYSICALDRIVE1")},
        devices=(("2fcc454e-a36a-4c77-bb5e-a2d75a51f02c", "PCI Express Port", {"HostResource": EVIL}),),
        changes={
            "settings": {"kernel": f"{EVIL}/kernel", "emulator": f"{EVIL}/run"},
            "_8e3a359f-559a-4b6a-98a9-1690a6100ed7_": {
                "port0": {"connection": f"\\\\.\\pipe{EVIL}"},
                "port1": {"connection": f"\\\\nas\\PIPE\\web{EVIL}"},
            },
            "tap": f"\\\\.\\Global{EVIL}",
        },
    )
    return VmcxExport().inspect(hyperv_exports.described(folder / "web", made, old=old), folder)


def hyperv_xml_source(folder: Path) -> VmManifest:
    return hyperv_source(folder, old=True)


def proxmox_source(folder: Path) -> VmManifest:
    config = {
        "name": "web",
        "memory": "1024",
        "scsi0": "local-lvm:vm-100-disk-2,size=32G",
        "scsi1": f"{EVIL}/disk,size=1G",
        "args": f"-kernel {EVIL}/kernel -L {EVIL}",
        "hookscript": f"local:snippets{EVIL}/hook",
        "hostpci0": f"0000:01:00,romfile={EVIL}/rom",
        "usb0": "host=1234:5678",
        "virtiofs0": f"dirid={EVIL}",
        "serial0": f"{EVIL}/tty",
        "parallel0": f"{EVIL}/lp",
        "smbios1": "uuid=6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11",
    }
    return proxmox(Seen("100", {"node": "pve1", "vmid": 100}, config, {"status": "running"}))


def nutanix_source(folder: Path) -> VmManifest:
    vm = {
        "extId": "6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11",
        "name": "web",
        "memorySizeBytes": 1 << 30,
        "gpus": [{"name": f"{EVIL}/gpu"}],
        "pcieDevices": [{"extId": EVIL}],
        "customKernel": f"{EVIL}/kernel",
        "serialPorts": [{"path": f"{EVIL}/serial"}],
        "disks": [],
    }
    return nutanix(of_central(vm, {}, {}), NutanixWay("nfs"))


def libvirt_source_of_all(folder: Path) -> VmManifest:
    """A few of them: a concern counts what is beyond twenty. Each by itself: tests/kvm/test_foreign_domain.py."""
    few = ("emulator", "kernel", "loader", "qemu arguments", "folder", "passthrough", "disc", "serial to a file", "evdev")
    top, devices = ("".join(part) for part in zip(*(REACHING[name] for name in few), strict=True))
    xml = f"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>web</name>
<uuid>6f0e8c7a-2d0f-4c9e-9d7a-1e1f0c9f4b11</uuid><memory>1048576</memory>{top}<devices>{devices}</devices></domain>"""
    return libvirt_source.manifest(libvirt_source.parse(xml), libvirt_source.Seen(sizes={}, power_state="off"))


# Of each: what its differences must name.
SOURCES: dict[str, tuple[Callable[[Path], VmManifest], tuple[str, ...]]] = {
    "OVF": (ovf_source, ("serial0.filename", "Serial 1", "a GPU")),
    "VMX": (vmx_source, ("serial0.filename", "parallel0.filename", "sharedfolder0.hostpath", "pcipassthru0")),
    "VBOX": (vbox_source, ("UART 0", "LPT 0", "shared folder all", "VBoxInternal/Devices/pcbios/0/Config/BiosRom", "/pci")),
    "XVA": (xva_source, ("PV_kernel", "PV_ramdisk", "PV_bootloader", "platform:device-model", "0000:04:00.0")),
    "XenServer": (xenserver_source, ("PV_kernel", "PV_ramdisk", "PV_bootloader", "platform:device-model", "0000:04:00.0")),
    "Hyper-V VMCX": (hyperv_source, ("PCI", "port0.connection", "port1.connection", "tap")),
    "Hyper-V XML": (hyperv_xml_source, ("PCI", "port0.connection", "port1.connection", "tap")),
    "Proxmox VE": (proxmox_source, ("args", "hook", "hostpci0", "usb0", "virtiofs0", "serial0", "parallel0")),
    "Nutanix": (nutanix_source, ("gpu", "1 devices")),
    "libvirt": (libvirt_source_of_all, ("not by /evil/run", "kernel", "commandline", "filesystem", "hostdev")),
}


def assert_harmless(xml: str, volumes: set[str]) -> None:
    root = ET.fromstring(xml)
    assert EVIL not in re.sub(r"<(name|title)>[^<]*</\1>", "", xml)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"emulator", "kernel", "initrd", "cmdline", "init", "bootloader", "hostdev", "filesystem", "commandline"}
    assert "schemas/domain/qemu" not in xml
    paths = set(re.findall(r"[\"'>](/[^\"'<]*)", xml))
    assert {path.replace(str(ID), "{uuid}") for path in paths} <= OURS | volumes


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_of_it_reaches_this_host_and_all_of_it_is_reported(name: str, tmp_path: Path) -> None:
    read, reported = SOURCES[name]
    made = domain_of(read(tmp_path))
    differences = " ".join(f"{one.what}: {one.source}" for one in made.differences)
    missing = [word for word in reported if word.lower() not in differences.lower()]
    assert not missing, f"{missing} not in: {differences}"


def domain_of(manifest: VmManifest) -> Domain:
    """As a job would define it; what is asserted of each."""
    host = Host(accelerator="kvm", serial_log="/log/{uuid}.log", network="user", uefi=UEFI, uefi_secure=UEFI, tpm=True)
    volumes = [Volume(disk.key, f"/volumes/{number}.raw", "file") for number, disk in enumerate(manifest.disks)]
    made = domain_xml.build(Machine(ID, manifest, Target()), volumes, host)
    assert_harmless(made.xml.replace(made.uuid, str(ID)), {volume.path for volume in volumes})
    return made


def test_each_kind_of_file_that_is_imported_is_here() -> None:
    """Single disks say nothing of a machine."""
    described = {kind.value.partition("_")[0] for kind in OfflineKind if "_" in kind.value}
    assert described == {"ova", "ovf", "vmx", "vmcx", "vbox", "xva"}


def test_whatever_a_platform_calls_things() -> None:
    """Of all platforms alike, vSphere's and Hyper-V's among them: a manifest is all that a domain is made of."""
    content = proxmox_source(Path()).model_dump(mode="json")
    content["disks"] = [{**content["disks"][0], "controller": EVIL, "source_path": EVIL, "label": EVIL}]
    content["nics"] = [{"key": EVIL, "model": EVIL, "network": f"{EVIL}'/><emulator>{EVIL}</emulator>", "mac": EVIL}]
    content["guest_os"] = {"family": "linux", "name": EVIL, "version": EVIL}
    content |= {"name": f"../..{EVIL}", "host": EVIL, "vm_id": EVIL}
    domain_of(VmManifest.model_validate_json(json.dumps(content)))


def test_a_restore_points_domain() -> None:
    top, devices = ("".join(part) for part in zip(*REACHING.values(), strict=True))
    made = restoring.foreign(
        f"<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>web</name>"
        f"<uuid>{ID}</uuid><memory>1</memory>{top}<devices>{devices}</devices></domain>"
    )
    assert "evil" not in made.xml
    for word in ("emulator", "commandline", "filesystem", "hostdev", "kernel"):
        assert any(word in one or "this host's own QEMU" in one for one in made.differences), word
