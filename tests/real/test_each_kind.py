"""The same guest in each container that is imported: every kind ends as a running guest, by the whole service and real QEMU."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.model.kinds import OfflineKind
from synvirt.sample import Sample, build
from synvirt.sizes import MIB
from tests import forked
from tests.disks import xva_archives
from tests.needs import need
from tests.offline import hyperv_exports, ova_xml_text, vbox_machines
from tests.processes import command_line

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
    with tarfile.open(sample.ova) as archive:
        archive.extractall(imports / "wrapped")
    return imports / "wrapped"


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
    raw = _raw(sample).read_bytes()
    text = ova_xml_text.one_disk(len(raw), memory_bytes=256 * MIB)
    return xva_archives.archive(imports / "wrapped.xva", text, {"Ref:4": raw})


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


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    need("qemu-img", "qemu-utils")
    need("qemu-system-x86_64", "qemu-system-x86")
    return build(tmp_path_factory.mktemp("sample"), payload_mib=1, keep_raw=True)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    yield data_dir
    # The embedded driver's guests outlive a service that failed.
    for entry in Path("/proc").glob("[0-9]*"):
        command = command_line(int(entry.name))
        if "qemu-system" in command.split(" ")[0] and str(data_dir) in command:
            os.kill(int(entry.name), signal.SIGKILL)


def imported(data_dir: Path, kind: OfflineKind, path: Path) -> dict[str, Any]:
    plan = {
        "source": {"Offline": kind},
        "source_ref": {"kind": "offline_host_path", "path": str(path)},
        "mode": "Cold",
        "target": NAMED if kind in SINGLE_DISKS else {},
    }
    argv = [sys.executable, "-m", "tests.real.one_job", str(data_dir)]
    done = forked.run(argv, input=json.dumps(plan), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", WRAPS)
def test_it_ends_as_a_running_guest(kind: OfflineKind, data_dir: Path, sample: Sample) -> None:
    path = WRAPS[kind](data_dir / "imports", sample)
    answer = imported(data_dir, kind, path)
    job = answer["job"]
    assert job["state"] == "Completed", job["last_error"]
    assert (job["boot_sign"], answer["id"]) == ("agent", sample.id)
    assert [disk["capacity_bytes"] for disk in job["manifest"]["disks"]] == [sample.capacity_bytes]
    assert job["manifest"]["guest_os"]["family"] == "linux"
    assert ("named" in job["domain"]["name"]) == (kind in SINGLE_DISKS)


def test_no_kind_is_left_out() -> None:
    assert set(WRAPS) == set(OfflineKind)
