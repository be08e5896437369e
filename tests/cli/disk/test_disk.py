"""synvirt disk: what it prints, how it ends, and that nothing half-made is ever left."""

import contextlib
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from tests.cli.disk.program import disk
from tests.devices import loop_device
from tests.disks.block_images import qemu
from tests.offline import appliances

MIB = 1 << 20


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
        file.write(b"boot" * 1000)
        file.seek(40 * MIB)
        file.write(os.urandom(3 * MIB))
    return path


@pytest.mark.parametrize("image_format", ["raw", "qcow2", "vhdx", "vpc", "vdi"])
def test_converts_any_format_to_the_same_raw_disk(image_format: str, raw: Path, tmp_path: Path) -> None:
    image = raw if image_format == "raw" else appliances.image(tmp_path / "images", "disk", image_format, raw)
    target = tmp_path / "out" / "target.raw"
    target.parent.mkdir()
    result = disk("convert", "--json", image, target)
    assert result.exit_code == 0, result.output
    assert filecmp.cmp(target, raw, shallow=False)
    assert target.stat().st_blocks * 512 < 8 * MIB
    report = json.loads(result.stdout)
    assert report["size_bytes"] == 64 * MIB == report["bytes_written"] + report["bytes_zero"]
    assert 0 < report["bytes_written"] <= 4 * MIB
    assert report["bytes_read"] >= 3 * MIB
    assert report["rate_bps"] > 0
    assert [path.name for path in target.parent.iterdir()] == ["target.raw"]


def test_says_what_was_done(raw: Path, tmp_path: Path) -> None:
    result = disk("convert", raw, tmp_path / "target.raw")
    assert result.exit_code == 0
    assert "64.0 MiB, of which 3." in result.stdout
    assert result.stderr == ""


def test_info_says_format_sizes_and_extents(raw: Path, tmp_path: Path) -> None:
    image = appliances.image(tmp_path / "images", "disk.qcow2", "qcow2", raw)
    result = disk("info", "--json", image)
    assert result.exit_code == 0, result.output
    [described] = json.loads(result.stdout)["disks"]
    assert described["name"] == "disk.qcow2"
    assert described["format"] == "qcow2"
    assert described["over"] == ["raw"]
    assert described["size_bytes"] == 64 * MIB == described["data_bytes"] + described["zero_bytes"]
    assert 3 * MIB <= described["data_bytes"] <= 4 * MIB
    plain = disk("info", image)
    assert ["format", "qcow2"] in [line.split() for line in plain.stdout.splitlines()]


def test_a_target_that_exists_is_replaced_only_by_force(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.raw"
    target.write_text("precious")
    result = disk("convert", raw, target)
    assert result.exit_code == 1
    assert result.stderr == "E_MIG_CONFLICT: target.raw already exists\nhint: --force replaces it\n"
    assert target.read_text() == "precious"
    assert disk("convert", "--force", raw, target).exit_code == 0
    assert filecmp.cmp(target, raw, shallow=False)


def test_a_damaged_image_leaves_no_target(raw: Path, tmp_path: Path) -> None:
    image = appliances.image(tmp_path / "images", "disk.qcow2", "qcow2", raw)
    os.truncate(image, image.stat().st_size - 2 * MIB)
    result = disk("convert", image, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert result.stderr.startswith(("E_MIG_MALFORMED_ARCHIVE: ", "E_MIG_DISK_READ_FAILED: "))
    assert not (tmp_path / "target.raw").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["convert", "/absent", "target.raw"],
        ["info", "/absent"],
        ["convert", "{raw}", "target.raw", "--threads", "0"],
        ["convert", "{raw}", "target.raw", "--disk", "other"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], raw: Path) -> None:
    result = disk(*(argument.format(raw=raw) for argument in arguments))
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_packed_image_is_not_copied_as_it_is(tmp_path: Path) -> None:
    packed, archive = tmp_path / "disk.img.gz", tmp_path / "web.tar"
    packed.write_bytes(b"\x1f\x8b" + bytes(1000))
    with tarfile.open(archive, "w") as file:
        file.addfile(tarfile.TarInfo("web/web.vmdk"))
    for path, hint in ((packed, "gunzip"), (archive, "Unpack it")):
        result = disk("convert", path, tmp_path / "target.raw")
        assert result.exit_code == 1
        assert hint in result.stderr
        assert not (tmp_path / "target.raw").exists()


def test_a_device_is_written_only_by_force_and_wholly(raw: Path, tmp_path: Path) -> None:
    backing = tmp_path / "backing.raw"
    with backing.open("wb") as file:
        for _ in range(65):
            file.write(b"x" * MIB)
    with loop_device(backing) as device:
        assert "E_MIG_CONFLICT" in disk("convert", raw, device).stderr
        result = disk("convert", "--force", raw, device)
        assert result.exit_code == 0, result.output
    with backing.open("rb") as found, raw.open("rb") as wanted:
        while piece := wanted.read(MIB):
            assert found.read(len(piece)) == piece
        assert found.read() == b"x" * MIB


def test_the_only_disk_of_an_appliance_is_copied_and_its_digest_checked(tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "vm.ova", appliances.appliance("qemu_user"))
    result = disk("convert", "--json", path, tmp_path / "target.raw")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["checksums_verified"] == ["disk1.qcow2"]
    assert (tmp_path / "target.raw").read_bytes() == appliances.raw_disk(seed=0)


def test_a_wrong_digest_leaves_no_target(tmp_path: Path) -> None:
    files = appliances.appliance("qemu_user")
    files["disk1.qcow2"] = files["disk1.qcow2"][:-1] + bytes([files["disk1.qcow2"][-1] ^ 1])
    path = appliances.archive(tmp_path / "vm.ova", files)
    result = disk("convert", path, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert result.stderr.startswith("E_MIG_MALFORMED_ARCHIVE: disk1.qcow2: its SHA256 is ")
    assert not (tmp_path / "target.raw").exists()


def test_of_several_disks_one_is_named(tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "vm.ova", appliances.appliance())
    names = [described["name"] for described in json.loads(disk("info", "--json", path).stdout)["disks"]]
    assert len(names) == 2
    result = disk("convert", path, tmp_path / "target.raw")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in names)
    assert disk("convert", path, tmp_path / "target.raw", "--disk", names[1]).exit_code == 0
    assert (tmp_path / "target.raw").read_bytes() == appliances.raw_disk(appliances.DISK_BYTES * 2, seed=1)


def opened_by(child: "subprocess.Popen[str]", folder: Path) -> bool:
    """Has the program a file open in the folder, by a name or without one?"""
    for descriptor in Path(f"/proc/{child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(folder) in str(descriptor.readlink()):
                return True
    return False


# A target that takes a second for each write, so that the signal comes in the middle, however busy the machine.
_ENDLESS = """\
import time
from synvirt.cli import app
from synvirt.disks.raw.files import RawWriter
write = RawWriter.write
def slowly(self, offset, buffer):
    time.sleep(1)
    write(self, offset, buffer)
RawWriter.write = slowly
app()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    source, folder = tmp_path / "disk.raw", tmp_path / "out"
    folder.mkdir()
    source.write_bytes(os.urandom(64 * MIB))
    argv = [sys.executable, "-c", _ENDLESS, "disk", "convert", str(source), f"{folder}/target.raw"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while not opened_by(child, folder) and time.monotonic() < deadline:
            time.sleep(0.001)
        child.send_signal(number)
        _, stderr = child.communicate(timeout=60)
    assert child.returncode != 0
    assert list(folder.iterdir()) == []
    assert "Traceback" not in stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["convert", "--help"], ["compare", "-h"]])
def test_help_says_how(arguments: list[str]) -> None:
    result = disk(*arguments)
    assert result.exit_code == 0
    assert "usage: synvirt disk" in result.output


def test_options_before_the_command_count_and_the_program_leaves_with_its_code(raw: Path, tmp_path: Path) -> None:
    before = CliRunner().invoke(app, ["--json", "disk", "info", str(raw)])
    assert json.loads(before.stdout)["disks"][0]["name"] == "disk.raw"
    argv = [sys.executable, "-m", "synvirt", "disk", "convert", str(raw), str(tmp_path / "target.raw")]
    first = subprocess.run(argv, capture_output=True, text=True)
    assert (first.returncode, first.stderr) == (0, "")
    assert "written" in first.stdout
    again = subprocess.run(argv, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("E_MIG_CONFLICT")


def test_what_is_no_target_is_said_and_nothing_is_replaced(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    before = Path(shutil.copy(raw, tmp_path / "before.raw"))
    for target, message in (
        (tmp_path / "out", f"{tmp_path / 'out'} is a folder\nhint: name the file to make: {tmp_path / 'out' / 'disk.raw'}"),
        (
            tmp_path / "uot" / "web.raw",
            f"there is no folder {tmp_path / 'uot'} for web.raw\nhint: did you mean {tmp_path / 'out'}?",
        ),
        (raw, f"{raw} is the image itself"),
        (
            tmp_path / "out" / "web.qcow2",
            "web.qcow2 is called a qcow2 image, and what is made is a raw disk\nhint: name it web.raw",
        ),
    ):
        done = disk("convert", "--force", raw, target)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert filecmp.cmp(raw, before, shallow=False)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("how", ["itself", "link", "hard link"])
def test_no_file_that_the_disk_is_read_from_is_replaced(how: str, raw: Path, tmp_path: Path) -> None:
    """The base of an overlay may be that of others, too."""
    target, before = tmp_path / "target.raw", Path(shutil.copy(raw, tmp_path / "before.raw"))
    base = raw.rename(target) if how == "itself" else raw
    if how == "link":
        target.symlink_to(raw)
    elif how == "hard link":
        target.hardlink_to(raw)
    for overlay in ("one", "other"):
        qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", overlay, cwd=tmp_path)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 7 0 1M", "one", cwd=tmp_path)
    done = disk("convert", "--force", tmp_path / "one", target)
    assert done.exit_code == 2
    assert f"{target} is {base.name}, a file that the disk is read from" in done.stderr
    assert filecmp.cmp(target, before, shallow=False)
    assert disk("compare", tmp_path / "other", before).exit_code == 0
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_a_ledger_replaces_no_file_of_the_disk_nor_its_copy(raw: Path, tmp_path: Path) -> None:
    image, before = tmp_path / "overlay", Path(shutil.copy(raw, tmp_path / "before.raw"))
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", raw.name, "-F", "raw", image.name, cwd=tmp_path)
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to(raw)
    (tmp_path / "here").symlink_to(tmp_path)
    target, content = tmp_path / "copy.raw", image.read_bytes()
    for ledger, message in (
        (image, f"{image} is the image itself"),
        (raw, f"{raw} is {raw.name}, a file that the disk is read from"),
        (tmp_path / "link", f"{tmp_path / 'link'} is {raw.name}, a file that the disk is read from"),
        (target, f"{target} is the new disk itself"),
        (tmp_path / "here" / target.name, f"{tmp_path / 'here' / target.name} is the new disk itself"),
        (tmp_path, f"{tmp_path} is no file"),
        (tmp_path / "device", f"{tmp_path / 'device'} is no file"),
    ):
        done = disk("convert", "--force", "--ledger", ledger, image, target)
        assert (done.exit_code, message in done.stderr) == (2, True), (ledger, done.stderr)
        assert not target.exists()
    assert filecmp.cmp(raw, before, shallow=False)
    assert image.read_bytes() == content
    assert disk("convert", "--force", "--ledger", tmp_path / "copy.ledger", image, target).exit_code == 0


def test_a_link_that_leads_nowhere_is_said(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nothing")
    for name, cause in (("loop", "Too many levels of symbolic links"), ("gone", "No such file or directory")):
        done = disk("info", tmp_path / name)
        assert done.stderr.startswith(f"E_MIG_BAD_REQUEST: {tmp_path / name} cannot be read: {cause}")
    assert disk("info", "").exit_code == 2


@pytest.mark.parametrize("command", ["info", "map", "convert"])
def test_an_empty_file_is_no_disk(command: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.img"
    empty.touch()
    done = disk(command, empty, *([tmp_path / "x.raw"] if command == "convert" else []))
    assert (done.exit_code, "empty.img is empty" in done.stderr) == (1, True)
    assert not (tmp_path / "x.raw").exists()
