"""What was looked at and what is opened later are one file, or it is an error: the worker opens under the root, too (S11)."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.checking.checksum import check
from synvirt.disks.roots import HOST, raw_spec
from synvirt.disks.specs import ChecksumSpec, QemuSpec
from synvirt.errors import DiskReadFailed, HostPathRejected, UnsupportedFormat
from synvirt.jobs.caging import _files
from tests.cage.test_cage import needs
from tests.contracts.spec_json import READER_SPEC
from tests.disks import swaps


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    (tmp_path / "shadow").write_bytes(b"secret" + bytes(506))
    folder = tmp_path / "imports"
    (folder / "vm").mkdir(parents=True)
    (folder / "vm" / "disk").write_bytes(bytes(512))
    return folder


@pytest.mark.parametrize("swap", [swaps.file, swaps.folder])
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
    swaps.file(imports)
    with pytest.raises(HostPathRejected):
        check(checksum)
    for spec in (image, keyed):
        with pytest.raises((HostPathRejected, UnsupportedFormat)):
            open_reader(spec)


def test_one_that_is_gone_is_reported_as_ever(imports: Path) -> None:
    spec = raw_spec(imports, imports / "vm" / "disk")
    (imports / "vm" / "disk").unlink()
    with pytest.raises(DiskReadFailed, match="is not there"):
        open_reader(spec)


def test_what_bounds_a_file_is_not_opened_to_its_reader(imports: Path) -> None:
    assert list(_files(raw_spec(imports, imports / "vm" / "disk"))) == [(str(imports / "vm" / "disk"), str(imports))]
    assert raw_spec(HOST, imports / "vm" / "disk").beneath is None


# ── and whoever takes the reader over gets no more of it ─────────────────────────────────────────────────────────────

# A worker up to its first byte, in the order of `jobs/worker.py`; at the moment that argv says, the file is swapped. Then its
# reader is asked, and whoever has taken that over opens what he likes.
WORKER = """
import json, os, sys
from pathlib import Path
from synvirt.cage import enter
from synvirt.disks import open_reader
from synvirt.disks.specs import FileWriterSpec
from synvirt.errors import SynvirtError
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from tests.contracts.spec_json import READER_SPEC
from tests.disks import swaps

moment, swap, imports, spec = sys.argv[1], sys.argv[2], Path(sys.argv[3]), READER_SPEC.validate_json(sys.argv[4])
path = str(imports / "vm" / "disk")
def now(name):
    if name == moment:
        getattr(swaps, swap)(imports)
now("before the cage is made")
cage = cage_of(CopyOrder(disks=(DiskOrder(key="a", reader=spec, writer=FileWriterSpec(path=path + ".out", size_bytes=512)),)))
now("before it is entered")
# The attacker is a process outside: it may still do in there what this one may not.
entered = os.pipe()
swapped = os.pipe()
if os.fork() == 0:
    os.read(entered[0], 1)
    now("before the file is opened")
    os.write(swapped[1], b"x")
    os._exit(0)
enter(cage)
os.write(entered[1], b"x")
os.read(swapped[0], 1)
found = {}
def tried(name, read):
    try:
        found[name] = read()[:6].decode()
    except (OSError, SynvirtError) as error:
        found[name] = type(error).__name__
def by_reader():
    content = memoryview(bytearray(6))
    open_reader(spec).read_into(0, content)
    return bytes(content)
tried("reader", by_reader)
tried("its name", lambda: open(path, "rb").read())
tried("the other", lambda: open(imports.parent / "shadow", "rb").read())
print(json.dumps(found))
"""
MOMENTS = ("never", "before the cage is made", "before it is entered", "before the file is opened")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("swap", [swaps.file, swaps.folder, swaps.another])
def test_at_no_moment_does_a_swap_open_another_file(imports: Path, moment: str, swap: Callable[[Path], None]) -> None:
    needs("landlock", "seccomp")
    imports.parent.chmod(0o755)
    (imports / "vm" / "disk").write_bytes(b"image.".ljust(512))
    spec = READER_SPEC.dump_json(raw_spec(imports, imports / "vm" / "disk")).decode()
    argv = [sys.executable, "-c", WORKER, moment, swap.__name__, str(imports), spec]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["the other"] == "PermissionError"
    if moment == "never":
        assert (found["reader"], found["its name"]) == ("image.", "image.")
    elif swap is swaps.another and moment == "before the cage is made":
        # Who may write there may put any file there: that one is the import.
        assert (found["reader"], found["its name"]) == ("other.", "other.")
    else:
        assert found["reader"] in ("HostPathRejected", "DiskReadFailed")
        assert found["its name"] in ("PermissionError", "FileNotFoundError")
