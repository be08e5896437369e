"""The same guest in each container that is imported: `python -m tests.real.wrapped FOLDER` writes all of them there."""

import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from synvirt.model.kinds import OfflineKind
from synvirt.sample import Sample, build
from synvirt.sizes import MIB
from tests.disks.xva import xva_archives
from tests.offline import vbox_machines
from tests.offline.hyperv import hyperv_exports
from tests.offline.xva import ova_xml_text

Wrap = Callable[[Path, Sample], Path]

VMX = """\
.encoding = "UTF-8"
config.version = "8"
virtualHW.version = "19"
displayName = "wrapped"
guestOS = "debian12-64"
memsize = "256"
scsi0.present = "TRUE"
scsi0.virtualDev = "lsilogic"
scsi0:0.present = "TRUE"
scsi0:0.fileName = "disk.vmdk"
ethernet0.present = "TRUE"
ethernet0.connectionType = "nat"
"""

UUID_OF_VSPHERE = b"""
      <vmw:ExtraConfig xmlns:vmw="http://www.vmware.com/schema/ovf" ovf:required="false" vmw:key="uuid.bios"
        vmw:value="42 1f 24 5c 7f a8 60 fa-6a f6 a4 63 51 ce d0 eb"/>
"""


def _raw(sample: Sample) -> Path:
    assert sample.raw is not None
    return sample.raw


def _converted(target: Path, sample: Sample, image_format: str, *options: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = ["qemu-img", "convert", "-f", "raw", "-O", image_format, *options, str(_raw(sample)), str(target)]
    subprocess.run(argv, check=True, timeout=60)
    return target


def _ova_archive(imports: Path, sample: Sample) -> Path:
    path = imports / "wrapped.ova"
    os.link(sample.ova, path)
    return path


def _ovf_folder(imports: Path, sample: Sample) -> Path:
    """With the UUID that vSphere named, as vmx-13 has it."""
    folder = imports / "wrapped"
    with tarfile.open(sample.ova) as archive:
        archive.extractall(folder)
    (descriptor,), (manifest,) = folder.glob("*.ovf"), folder.glob("*.mf")
    before = descriptor.read_bytes()
    descriptor.write_bytes(before.replace(b"</VirtualHardwareSection>", UUID_OF_VSPHERE + b"</VirtualHardwareSection>"))
    old, new = (hashlib.sha256(text).hexdigest() for text in (before, descriptor.read_bytes()))
    manifest.write_text(manifest.read_text().replace(old, new))
    return folder


def _vmx_folder(imports: Path, sample: Sample) -> Path:
    _converted(imports / "wrapped" / "disk.vmdk", sample, "vmdk", "-o", "subformat=twoGbMaxExtentSparse")
    (imports / "wrapped" / "wrapped.vmx").write_text(VMX)
    return imports / "wrapped"


def _vbox_folder(imports: Path, sample: Sample) -> Path:
    """A snapshot was taken in the middle of its life: each second mebibyte was written after it."""
    folder, parts = imports / "wrapped", [imports.parent / "before", imports.parent / "after"]
    (folder / "Snapshots").mkdir(parents=True)
    (folder / "wrapped.vbox").write_bytes(vbox_machines.one_disk(memory_mib=256))
    with _raw(sample).open("rb") as raw, parts[0].open("wb") as before, parts[1].open("wb") as after:
        for at in range(0, sample.capacity_bytes, MIB):
            part = after if at // MIB % 2 else before
            part.seek(at)
            part.write(raw.read(MIB))
        for part in (before, after):
            part.truncate(sample.capacity_bytes)
    vbox_machines.vdi_file(folder / "web.vdi", parts[0], vbox_machines.BASE)
    snapshot = folder / f"Snapshots/{{{vbox_machines.FIRST}}}.vdi"
    vbox_machines.vdi_file(snapshot, parts[1], vbox_machines.FIRST, vbox_machines.BASE)
    return folder


def _xva_archive(imports: Path, sample: Sample) -> Path:
    text = ova_xml_text.one_disk(sample.capacity_bytes, memory_bytes=256 * MIB)
    return xva_archives.archive(imports / "wrapped.xva", text, {"Ref:4": _raw(sample)})


def _vmcx_export(imports: Path, sample: Sample) -> Path:
    disk = _converted(imports.parent / "web.vhdx", sample, "vhdx")
    return hyperv_exports.export(imports / "wrapped", {"ide0:0": disk}, memory_mib=256, processors=1)


WRAPS: dict[OfflineKind, Wrap] = {
    OfflineKind.OVA_ARCHIVE: _ova_archive,
    OfflineKind.OVF_FOLDER: _ovf_folder,
    OfflineKind.VMX_FOLDER: _vmx_folder,
    OfflineKind.VBOX_FOLDER: _vbox_folder,
    OfflineKind.XVA_ARCHIVE: _xva_archive,
    OfflineKind.VMCX_EXPORT: _vmcx_export,
    OfflineKind.VHDX: lambda imports, sample: _converted(imports / "wrapped.vhdx", sample, "vhdx"),
    OfflineKind.QCOW2: lambda imports, sample: _converted(imports / "wrapped.qcow2", sample, "qcow2", "-c"),
    OfflineKind.VMDK: lambda imports, sample: _converted(imports / "wrapped.vmdk", sample, "vmdk"),
}
# A disk by itself does not say what machine it belongs to: the plan does.
NAMED = {"name": "named", "cpu_count": 1, "memory_bytes": 256 * MIB}
SINGLE_DISKS = (OfflineKind.VHDX, OfflineKind.QCOW2, OfflineKind.VMDK)


def main(folder: Path) -> None:
    """Prints of each kind a line: the kind, and the path within FOLDER that is imported. The raw disk is FOLDER/sample.raw."""
    sample = build(folder, payload_mib=1, name="sample", keep_raw=True)
    for kind, wrap in WRAPS.items():
        (folder / kind).mkdir()
        print(kind, wrap(folder / kind, sample).relative_to(folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
