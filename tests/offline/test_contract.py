"""Every registered importer, held to the laws of OfflineImporter."""

from pathlib import Path

import pytest

from synvirt.offline.hyperv.export import VmcxExport
from synvirt.offline.ovf.archive import OvaArchive
from synvirt.offline.ovf.folder import OvfFolder
from synvirt.offline.registry import IMPORTERS
from synvirt.offline.single.qcow2 import Qcow2
from synvirt.offline.single.vhdx import Vhdx
from synvirt.offline.single.vmdk import Vmdk
from synvirt.offline.vbox.folder import VboxFolder
from synvirt.offline.vmx.folder import VmxFolder
from synvirt.offline.xva.archive import XvaArchive
from tests.contracts.importers import ImporterCase, ImporterContract
from tests.disks.xva import xva_archives
from tests.offline import appliances, vbox_machines
from tests.offline.hyperv import hyperv_exports
from tests.offline.xva import geneva_exports, ova_xml_text


def of_ovftool() -> dict[str, bytes]:
    return {"vmdisk1": appliances.raw_disk(seed=0), "vmdisk2": appliances.raw_disk(2 * appliances.DISK_BYTES, seed=1)}


class TestOvaArchive(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        path = appliances.archive(tmp_path / "winsrv.ova", appliances.appliance())
        return ImporterCase(OvaArchive(), path, tmp_path, of_ovftool(), damage=path)


class TestOvfFolder(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        path = appliances.folder(tmp_path / "winsrv", appliances.appliance())
        return ImporterCase(OvfFolder(), path, tmp_path, of_ovftool(), damage=path / "ovftool.ovf")


class TestOvfByItsOwnPath(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        path = appliances.folder(tmp_path / "winsrv", appliances.appliance()) / "ovftool.ovf"
        return ImporterCase(OvfFolder(), path, tmp_path, of_ovftool(), damage=path)


class TestVhdx(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        raw = appliances.raw_disk()
        path = appliances.image(tmp_path, "web.vhdx", "vhdx", raw)
        return ImporterCase(Vhdx(), path, tmp_path, {"disk0": raw}, damage=path)


class TestQcow2(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        raw = appliances.raw_disk()
        path = appliances.image(tmp_path, "web.qcow2", "qcow2", raw)
        return ImporterCase(Qcow2(), path, tmp_path, {"disk0": raw}, damage=path)


class TestVmdk(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        raw = appliances.raw_disk()
        path = appliances.stream_vmdk(tmp_path, "web.vmdk", raw)
        return ImporterCase(Vmdk(), path, tmp_path, {"disk0": raw}, damage=path)


class TestXvaArchive(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        disks = {"Ref:4": appliances.raw_disk(), "Ref:5": appliances.raw_disk(3 << 20, seed=2)}
        text = ova_xml_text.whole({folder: len(disk) for folder, disk in disks.items()})
        path = xva_archives.archive(tmp_path / "web.xva", text, disks, keepalives={3})
        return ImporterCase(XvaArchive(), path, tmp_path, disks, damage=path)


class TestXvaArchivePacked(ImporterContract):
    """As XenServer's compress=true and XCP-ng's compress=zstd leave it: the name is the same."""

    @pytest.fixture(params=["gzip", "zstd"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ImporterCase:
        disks = {"Ref:4": appliances.raw_disk(), "Ref:5": appliances.raw_disk(3 << 20, seed=2)}
        text = ova_xml_text.whole({folder: len(disk) for folder, disk in disks.items()})
        plain = xva_archives.archive(tmp_path / "web.xva", text, disks, keepalives={3})
        path = xva_archives.packed(plain, request.param).rename(plain)
        return ImporterCase(XvaArchive(), path, tmp_path, disks, damage=path)


class TestXvaVersion1(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        disks = {"sda": appliances.raw_disk(), "sdb": appliances.raw_disk(3 << 20, seed=2)}
        folder = appliances.folder(tmp_path / "old", geneva_exports.files(disks))
        contents = {f"vdi_{device}": disk for device, disk in disks.items()}
        return ImporterCase(XvaArchive(), folder, tmp_path, contents, damage=folder / "ova.xml")


class TestVmxFolder(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        folder = tmp_path / "web"
        (folder / "data").mkdir(parents=True)
        (folder / "web.vmx").write_bytes((appliances.DESCRIPTIONS / "workstation.vmx").read_bytes())
        files = {"nvme0:0": "fast.vmdk", "scsi0:0": "web.vmdk", "scsi0:1": "data/web data.vmdk"}
        disks = {key: appliances.raw_disk(seed=number) for number, key in enumerate(files)}
        for key, name in files.items():
            (folder / name).write_bytes(appliances.disk_file("vmdk", appliances.DISK_BYTES, list(files).index(key)))
        return ImporterCase(VmxFolder(), folder, tmp_path, disks, damage=folder / "web.vmx")


class TestVboxFolder(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        folder = vbox_machines.machine(tmp_path / "web")
        disks = {"ide1:1": appliances.raw_disk(seed=1), "sata0:0": vbox_machines.blocks(vbox_machines.SEEN)}
        return ImporterCase(VboxFolder(), folder, tmp_path, disks, damage=folder / "web.vbox")


class TestVmcxExport(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        disks = {"ide0:0": appliances.raw_disk(seed=1), "scsi0:1": appliances.raw_disk(3 << 20, seed=2)}
        images = {key: appliances.image(tmp_path, f"{key[:3]}.vhdx", "vhdx", raw) for key, raw in disks.items()}
        folder = hyperv_exports.export(tmp_path / "web", images)
        damage = folder / "Virtual Machines" / f"{hyperv_exports.MACHINE}.vmcx"
        return ImporterCase(VmcxExport(), folder, tmp_path, disks, damage=damage)


class TestVmcxExportOf2012(ImporterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ImporterCase:
        raw = appliances.raw_disk()
        folder = hyperv_exports.export(tmp_path / "web", {"ide0:0": appliances.image(tmp_path, "a.vhd", "vpc", raw)}, old=True)
        path = folder / "Virtual Machines" / f"{hyperv_exports.MACHINE}.xml"
        return ImporterCase(VmcxExport(), path, tmp_path, {"ide0:0": raw}, damage=path)


def test_every_registered_importer_is_in_the_suite(tmp_path: Path) -> None:
    suites = {name.removeprefix("Test") for name, value in globals().items() if isinstance(value, type)}
    assert {type(importer).__name__ for importer in IMPORTERS} <= suites
