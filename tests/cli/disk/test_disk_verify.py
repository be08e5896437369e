"""synvirt disk convert --verify and --ledger: what was read is what the target holds, or the place that differs is named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.disk import convert
from synvirt.copying import Copied, copy
from synvirt.disks.checking.ledger import Ledger
from synvirt.disks.raw.files import RawWriter
from synvirt.programs import run
from tests.cli.disk.program import disk
from tests.devices import loop_device
from tests.disks.block_images import assert_same_file
from tests.offline import appliances

MIB = 1 << 20


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(40 * MIB)
        file.write(b"boot" * 1000)
        file.seek(21 * MIB)
        file.write(os.urandom(5 * MIB))
    return path


@pytest.mark.parametrize("image_format", ["raw", "qcow2", "vhdx", "vdi"])
def test_says_what_verifying_took_and_writes_the_ledger(image_format: str, raw: Path, tmp_path: Path) -> None:
    image = raw
    if image_format != "raw":
        (tmp_path / "images").mkdir()
        image = appliances.image(tmp_path / "made", "disk", image_format, raw).rename(tmp_path / "images" / "disk")
    target, ledger = tmp_path / "target.raw", tmp_path / "ledger.jsonl"
    result = disk("convert", "--json", "--verify", "--ledger", ledger, image, target)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ledger"] == {"algorithm": "sha256", "rows": report["ledger"]["rows"], "path": str(ledger)}
    # Blocks of 4 MiB that hold data: the first, and two in the middle.
    assert report["verified"]["bytes_read"] == 3 * 4 * MIB
    assert report["verified"]["rate_bps"] > 0
    assert report["size_bytes"] == 40 * MIB == report["bytes_written"] + report["bytes_zero"]
    assert_same_file(target, raw)
    with ledger.open() as file:
        found = Ledger.from_lines(file)
    assert found.size == 40 * MIB
    assert len(found.rows) == report["ledger"]["rows"]


def test_says_which_hash_it_verified_by(raw: Path, tmp_path: Path) -> None:
    result = disk("convert", "--json", "--verify", raw, tmp_path / "target.raw")
    assert json.loads(result.stdout)["ledger"] == {"algorithm": "xxh3-128", "rows": 5}
    stdout = disk("convert", "--verify", raw, tmp_path / "other.raw").stdout
    assert "; verified by XXH3-128: 12.0 MiB read back in " in stdout


def test_the_ledger_of_a_disk_is_the_same_from_any_format(raw: Path, tmp_path: Path) -> None:
    ledgers = []
    for image_format in ("raw", "qcow2", "vdi"):
        image = raw if image_format == "raw" else appliances.image(tmp_path / image_format, "disk.raw", image_format, raw)
        ledger = tmp_path / f"{image_format}.jsonl"
        assert disk("convert", "--ledger", ledger, image, tmp_path / f"{image_format}.out").exit_code == 0
        ledgers.append(ledger.read_bytes())
    assert ledgers[0] == ledgers[1] == ledgers[2]


@pytest.mark.parametrize(("options", "algorithm"), [((), "XXH3-128"), (("--ledger", "ledger"), "SHA256")])
@pytest.mark.parametrize("where", [0, 3999, 21 * MIB, 26 * MIB - 1])
def test_a_target_that_does_not_keep_what_it_is_given_is_found(
    where: int, options: tuple[str, ...], algorithm: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write = RawWriter.write

    def corrupting(self: RawWriter, offset: int, buffer: memoryview) -> None:
        if offset <= where < offset + len(buffer):
            changed = bytearray(buffer)
            changed[where - offset] ^= 1
            buffer = memoryview(changed)
        write(self, offset, buffer)

    monkeypatch.setattr(RawWriter, "write", corrupting)
    result = disk("convert", "--verify", raw, tmp_path / "target.raw", *options)
    assert result.exit_code == 1
    block = where // (4 * MIB) * 4 * MIB
    assert result.stderr.startswith(f"E_MIG_DISK_WRITE_FAILED: disk.raw: the 4194304 bytes at offset {block} were read back")
    assert result.stderr.count(f"{algorithm} ") == 2
    assert not (tmp_path / "target.raw").exists()
    assert not (tmp_path / "ledger").exists()


def test_a_hole_where_data_was_written_is_found(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RawWriter, "write", lambda self, offset, buffer: None)
    result = disk("convert", "--verify", raw, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert "at offset 0 were read back from the target as zeros; expected is XXH3-128 " in result.stderr


def test_a_device_is_verified_in_the_disk_and_no_further(raw: Path, tmp_path: Path) -> None:
    backing = tmp_path / "backing.raw"
    with backing.open("wb") as file:
        for _ in range(41):
            file.write(b"x" * MIB)
    with loop_device(backing) as device:
        result = disk("convert", "--force", "--verify", raw, device)
        assert result.exit_code == 0, result.output
    with backing.open("rb") as file:
        file.seek(40 * MIB)
        assert file.read() == b"x" * MIB
    os.truncate(backing, 40 * MIB)
    assert_same_file(backing, raw)


def test_a_ledger_that_exists_is_replaced_only_by_force(raw: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("precious")
    result = disk("convert", "--ledger", ledger, raw, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert result.stderr.startswith("E_MIG_CONFLICT: ledger already exists")
    assert not (tmp_path / "target.raw").exists()
    assert disk("convert", "--force", "--ledger", ledger, raw, tmp_path / "target.raw").exit_code == 0
    assert '"ledger":"synvirt"' in ledger.read_text()
    missing = disk("convert", "--ledger", tmp_path / "absent" / "ledger", raw, tmp_path / "other.raw")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("E_MIG_DISK_WRITE_FAILED: ledger cannot be written: No such file")
    assert not (tmp_path / "other.raw").exists()


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_a_backing_file_that_is_written_to_meanwhile_gives_no_target(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: tuple[str, ...]
) -> None:
    """What was read is what the target holds; but it is no disk that there ever was."""
    image = tmp_path / "top.qcow2"
    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", raw.name, "-F", "raw", str(image)]
    run(create, timeout_s=60)

    def copy_and_write(*given: Any, **named: Any) -> Copied:
        done = copy(*given, **named)
        last = raw.stat().st_mtime_ns
        os.utime(raw, ns=(last, last + 1))
        return done

    monkeypatch.setattr(convert, "copy", copy_and_write)
    result = disk("convert", *verify, image, tmp_path / "target.raw")
    assert result.exit_code == 1
    assert f"{raw.name} was changed while it was read: it was written to" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk.raw", "top.qcow2"]
