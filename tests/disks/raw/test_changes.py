"""Files that change while a disk is read from them, whichever of its files it is."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.noted_files import names_of_changed
from synvirt.disks.raw.changes import opening
from synvirt.disks.specs import ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import DiskReadFailed
from synvirt.programs import run
from synvirt.sizes import MIB


def backed(folder: Path) -> tuple[ReaderSpec, Path]:
    """A qcow2 image, and its backing file."""
    base = folder / "base.raw"
    base.write_bytes(os.urandom(4 * MIB))
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", str(folder / "top.qcow2")], timeout_s=60)
    over = RawSpec(path=str(folder / "top.qcow2"))
    return ImageSpec(format="qcow2", over=over, root=str(folder), name="top.qcow2"), base


def flat(folder: Path) -> tuple[ReaderSpec, Path]:
    """A VMDK, and the file of its extent."""
    (folder / "flat.raw").write_bytes(os.urandom(4 * MIB))
    options = ["-O", "vmdk", "-o", "subformat=monolithicFlat"]
    run(["qemu-img", "convert", "-f", "raw", *options, str(folder / "flat.raw"), str(folder / "x.vmdk")], timeout_s=60)
    spec = ImageSpec(format="vmdk", over=RawSpec(path=str(folder / "x.vmdk")), root=str(folder), name="x.vmdk")
    return spec, folder / "x-flat.vmdk"


def itself(folder: Path) -> tuple[ReaderSpec, Path]:
    """A raw disk."""
    (folder / "disk.raw").write_bytes(os.urandom(4 * MIB))
    return RawSpec(path=str(folder / "disk.raw")), folder / "disk.raw"


Made = Callable[[Path], tuple[ReaderSpec, Path]]
KINDS = pytest.mark.parametrize("made", [backed, flat, itself])


def write_into(path: Path) -> None:
    """A byte of it, a second after its last change."""
    last = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(last, last + 1_000_000_000))


@KINDS
def test_a_file_that_is_written_to_is_named(made: Made, tmp_path: Path) -> None:
    spec, path = made(tmp_path)
    with opening() as files, closing(open_reader(spec)) as reader:
        buffer = bytearray(MIB)
        reader.read_into(0, memoryview(buffer))
        files.refuse_changed()
        write_into(path)
        with pytest.raises(DiskReadFailed, match=rf"^{path.name} was changed while it was read: it was written to") as caught:
            files.refuse_changed()
    assert "let its copying end" in str(caught.value.hint)


@KINDS
def test_a_file_that_grows_is_named_with_both_sizes(made: Made, tmp_path: Path) -> None:
    spec, path = made(tmp_path)
    before = path.stat().st_size
    with opening() as files, closing(open_reader(spec)):
        os.truncate(path, before + 512)
        with pytest.raises(DiskReadFailed, match=rf"{path.name} .* had {before} bytes, and has {before + 512}"):
            files.refuse_changed()


@KINDS
def test_another_process_sees_that_a_file_was_replaced(made: Made, tmp_path: Path) -> None:
    spec, path = made(tmp_path)
    with opening() as files, closing(open_reader(spec)):
        first = files.found
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").rename(path)
        files.refuse_changed()  # the reader has the file open that it began with
    with opening() as again, closing(open_reader(spec)):
        assert names_of_changed(first, again.found) == [path.name]
    with opening() as files, closing(open_reader(spec)):
        assert files.found == again.found


def test_what_is_opened_elsewhere_may_change(tmp_path: Path) -> None:
    spec, path = itself(tmp_path)
    with opening() as files:
        pass
    with closing(open_reader(spec)):
        write_into(path)
    files.refuse_changed()
    assert files.found == ()
