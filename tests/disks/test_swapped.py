"""What was looked at and what is opened later are one file, or it is an error: the worker opens under the root, too (S11)."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.checking.checksum import check
from synvirt.disks.roots import HOST, raw_spec
from synvirt.disks.spec_json import READER_SPEC
from synvirt.disks.specs import ChecksumSpec, QemuSpec
from synvirt.errors import DiskReadFailed, HostPathRejected, UnsupportedFormat
from synvirt.jobs.caging import _paths


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    (tmp_path / "shadow").write_bytes(b"secret" + bytes(506))
    folder = tmp_path / "imports"
    (folder / "vm").mkdir(parents=True)
    (folder / "vm" / "disk").write_bytes(bytes(512))
    return folder


def _file(imports: Path) -> None:
    (imports / "vm" / "disk").unlink()
    (imports / "vm" / "disk").symlink_to("../../shadow")


def _folder(imports: Path) -> None:
    (imports / "vm").rename(imports / "old")
    (imports.parent / "outside").mkdir()
    (imports.parent / "outside" / "disk").write_bytes(b"secret" + bytes(506))
    (imports / "vm").symlink_to("../outside")


@pytest.mark.parametrize("swap", [_file, _folder])
def test_a_file_that_was_swapped_is_not_copied(imports: Path, swap: Callable[[Path], None]) -> None:
    spec = READER_SPEC.validate_json(READER_SPEC.dump_json(raw_spec(imports, imports / "vm" / "disk")))
    with closing(open_reader(spec)) as reader:
        assert reader.size == 512
    swap(imports)
    with pytest.raises(HostPathRejected, match="disk leads out of the import root") as refused:
        open_reader(spec)
    assert str(imports) not in refused.value.detail


def test_nor_is_its_digest_taken_nor_qemu_given_it(imports: Path) -> None:
    path = str(imports / "vm" / "disk")
    checksum = ChecksumSpec(path=path, length=512, algorithm="sha256", expected="0", name="disk", beneath=str(imports))
    image = QemuSpec(driver="qed", path=path, beneath=str(imports))
    keyed = QemuSpec(driver="qcow2", path=str(imports / "vm"), key_file=path, beneath=str(imports))
    _file(imports)
    with pytest.raises(HostPathRejected):
        check(checksum)
    for spec in (image, keyed):
        with pytest.raises((HostPathRejected, UnsupportedFormat)):
            open_reader(spec)


def test_one_that_is_gone_is_told_as_ever(imports: Path) -> None:
    spec = raw_spec(imports, imports / "vm" / "disk")
    (imports / "vm" / "disk").unlink()
    with pytest.raises(DiskReadFailed, match="is not there"):
        open_reader(spec)


def test_what_bounds_a_file_is_not_opened_to_its_reader(imports: Path) -> None:
    assert list(_paths(raw_spec(imports, imports / "vm" / "disk"))) == [str(imports / "vm" / "disk")]
    assert raw_spec(HOST, imports / "vm" / "disk").beneath is None
