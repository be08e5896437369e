"""synvirt disk verify: what differs from the ledger is named, and repaired from the source, and nothing else is touched."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.disks import open_reader
from synvirt.disks.checking.block_hashes import BlockHashes
from synvirt.disks.checking.ledger import BLOCK_BYTES, Hashing, Ledger
from synvirt.disks.checking.repairing import UNIT_BYTES, differing_rows, repair
from synvirt.disks.raw.files import RawReader, RawWriter, open_file_writer
from synvirt.disks.specs import RawSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from synvirt.proof.keeping import CopiedDisk, MovedJob, Receipts
from synvirt.proof.signing import HostKey
from synvirt.proof.unpacking import unpack
from tests.cli.disk.program import disk
from tests.devices import loop_device
from tests.disks.block_images import assert_same_file
from tests.needs import need
from tests.offline import appliances

MIB = 1 << 20
SIZE = 40 * MIB + 512


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """Data, zeros, an end within a block. What a disk holds before it is damaged."""
    return made(tmp_path / "content")


def made(path: Path) -> Path:
    chance = random.Random(7)
    with path.open("wb") as file:
        file.truncate(SIZE)
        for start, end in ((0, 6 * MIB), (21 * MIB, 26 * MIB), (SIZE - 700, SIZE)):
            file.seek(start)
            file.write(chance.randbytes(end - start))
    return path


def byte(path: Path, place: int) -> int:
    with path.open("rb") as file:
        file.seek(place)
        return file.read(1)[0]


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A source, the volume that was copied from it, and the ledger of that."""
    source, volume, ledger = tmp_path / "disk.raw", tmp_path / "volume.raw", tmp_path / "ledger"
    made(source)
    result = disk("convert", "--ledger", ledger, source, volume)
    assert result.exit_code == 0, result.output
    return source, volume, ledger


def flip(path: Path, places: list[int]) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0] if place < SIZE else 0
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("seed", range(8))
def test_seeded_flips_are_named_and_repaired_and_nothing_else(
    seed: int, moved: tuple[Path, Path, Path], content: Path, tmp_path: Path
) -> None:
    source, volume, ledger = moved
    chance = random.Random(seed)
    places = sorted(chance.sample(range(SIZE), chance.choice([1, 3, 12])))
    flip(volume, places)
    image = source
    if seed % 2:
        image = appliances.image(tmp_path / "made", "disk.raw", "qcow2", content)
    seen = disk("verify", "--json", "--ledger", ledger, volume)
    assert seen.exit_code == 1, seen.output
    differing = json.loads(seen.stdout)["differing"]
    assert all(any(row["start"] <= place < row["start"] + row["length"] for row in differing) for place in places)
    assert all(any(row["start"] <= place < row["start"] + row["length"] for place in places) for row in differing)

    mended = disk("verify", "--json", "--ledger", ledger, "--repair", image, volume)
    assert mended.exit_code == 0, mended.output
    report = json.loads(mended.stdout)
    units = {unit for one in report["repaired"] for unit in range(one["start"], one["start"] + one["length"], UNIT_BYTES)}
    assert units == {place // UNIT_BYTES * UNIT_BYTES for place in places}
    assert report["not_repaired"] == []
    assert_same_file(volume, content)
    again = disk("verify", "--ledger", ledger, volume)
    assert again.exit_code == 0
    assert "holds what the ledger of disk.raw says" in again.stdout


def test_what_the_ledger_does_not_have_is_said_not_to_be_compared(moved: tuple[Path, Path, Path]) -> None:
    _, volume, ledger = moved
    assert "not compared" not in disk("verify", "--ledger", ledger, volume).stdout
    os.truncate(volume, SIZE + 4096)
    assert "4096 bytes of the volume are not in the ledger" in disk("verify", "--ledger", ledger, volume).stdout
    report = json.loads(disk("verify", "--json", "--ledger", ledger, volume).stdout)
    assert (report["good"], report["size_bytes"], report["compared_bytes"]) == (True, SIZE + 4096, SIZE)
    head, *rows, _ = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([head, rows[0], '{"rows":1}\n']))
    left = SIZE + 4096 - json.loads(rows[0])["length"]
    assert f"{left} bytes of the volume are not in the ledger" in disk("verify", "--ledger", ledger, volume).stdout


def test_the_source_is_read_where_the_volume_differs_and_nowhere_else(
    moved: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, volume, ledger = moved
    flip(volume, [100, 5 * MIB, 22 * MIB])
    read: list[tuple[str, int, int]] = []
    read_into = RawReader.read_into

    def counted(self: RawReader, offset: int, buffer: memoryview) -> None:
        read.append((str(Path(f"/proc/self/fd/{self.descriptor}").readlink()), offset, len(buffer)))
        read_into(self, offset, buffer)

    monkeypatch.setattr(RawReader, "read_into", counted)
    result = disk("verify", "--ledger", ledger, "--repair", source, volume)
    assert result.exit_code == 0, result.output
    of_source = sorted((offset, length) for path, offset, length in read if path == str(source))
    blocks, headers = [[one for one in of_source if (one[1] == BLOCK_BYTES) == whole] for whole in (True, False)]
    assert blocks == [(block * BLOCK_BYTES, BLOCK_BYTES) for block in (0, 1, 5)]
    assert sum(length for _, length in headers) < MIB, "what it is, is seen by its first bytes"
    read.clear()
    assert disk("verify", "--ledger", ledger, "--repair", source, volume).exit_code == 0
    assert sum(length for path, _, length in read if path == str(source)) < MIB


def test_a_source_that_has_changed_since_repairs_nothing_of_what_changed(moved: tuple[Path, Path, Path], content: Path) -> None:
    source, volume, ledger = moved
    flip(volume, [100, 22 * MIB])
    flip(source, [200])
    result = disk("verify", "--ledger", ledger, "--repair", source, volume)
    assert result.exit_code == 1
    assert f"{UNIT_BYTES} bytes at {22 * MIB}: was repaired from the source" in result.stdout
    assert f"{BLOCK_BYTES} bytes at 0: was not repaired: the source does not hold" in result.stdout
    assert byte(volume, 22 * MIB) == byte(content, 22 * MIB)
    assert byte(volume, 100) == byte(content, 100) ^ 0x40


@contextmanager
def opened_by_qemu(volume: Path, *options: str) -> Iterator[None]:
    command = [need("qemu-io", "qemu-utils"), *options, "-f", "raw", str(volume)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as qemu:
        assert qemu.stdin is not None
        assert qemu.stdout is not None
        qemu.stdin.write("length\n")
        qemu.stdin.flush()
        assert "MiB" in qemu.stdout.readline()  # it has opened its image
        yield
        qemu.stdin.close()


@pytest.mark.parametrize("repair", [True, False], ids=["repaired", "compared"])
def test_a_volume_that_qemu_writes_is_left_alone(repair: bool, moved: tuple[Path, Path, Path], content: Path) -> None:
    """What a guest has written differs from the ledger, and is no damage."""
    source, volume, ledger = moved
    flip(volume, [100])
    with opened_by_qemu(volume):
        result = disk("verify", "--ledger", ledger, *(("--repair", source) if repair else ()), volume)
    assert result.exit_code == 1
    assert result.stderr.startswith("E_MIG_CONFLICT: volume.raw is in use by a guest")
    assert byte(volume, 100) == byte(content, 100) ^ 0x40


def test_a_volume_that_qemu_only_reads_is_compared(moved: tuple[Path, Path, Path]) -> None:
    _, volume, ledger = moved
    with opened_by_qemu(volume, "-r"):
        result = disk("verify", "--ledger", ledger, volume)
    assert result.exit_code == 0, result.stderr


def test_a_device_is_repaired_within_its_disk(moved: tuple[Path, Path, Path], content: Path, tmp_path: Path) -> None:
    source, _, ledger = moved
    backing = tmp_path / "backing.raw"
    with made(backing).open("ab") as file:
        file.write(b"x" * MIB)
    flip(backing, [5, 10 * MIB])
    with loop_device(backing) as device:
        result = disk("verify", "--ledger", ledger, "--repair", source, device)
        assert result.exit_code == 0, result.output
    with backing.open("rb") as file:
        file.seek(SIZE)
        assert file.read() == b"x" * MIB
    os.truncate(backing, SIZE)
    assert_same_file(backing, content)


def test_what_the_volume_cannot_read_is_written_again(moved: tuple[Path, Path, Path], content: Path) -> None:
    source, volume, _ = moved

    class Bad(RawReader):
        """A sector that cannot be read until it is written."""

        broken = True

        def read_into(self, offset: int, buffer: memoryview) -> None:
            if self.broken and offset <= 21 * MIB < offset + len(buffer):
                raise DiskReadFailed("volume.raw: input/output error")
            super().read_into(offset, buffer)

    class Mending(RawWriter):
        def write(self, offset: int, buffer: memoryview) -> None:
            super().write(offset, buffer)
            reader.broken = False

    reader = Bad(str(volume))
    flip(volume, [21 * MIB])
    with_ledger = _ledger_of(source)
    rows = differing_rows(with_ledger, reader)
    assert [row.start for row in rows] == [20 * MIB]
    plain = open_file_writer(str(volume), SIZE)
    writer = Mending(plain.descriptor, "volume.raw", SIZE, zeroings=())
    found = repair(rows, open_reader(RawSpec(path=str(source))), reader, writer)
    assert [(one.start, one.length) for one in found.written] == [(20 * MIB, BLOCK_BYTES)]
    assert_same_file(volume, content)
    reader.close()
    writer.close()


def test_storage_that_does_not_keep_what_is_written_is_found(
    moved: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, volume, ledger = moved
    flip(volume, [100])
    monkeypatch.setattr(RawWriter, "write", lambda self, offset, buffer: None)
    result = disk("verify", "--ledger", ledger, "--repair", source, volume)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{DiskWriteFailed.code}: the {BLOCK_BYTES} bytes at offset 0 were repaired, and read back")


def test_a_jobs_volume_is_held_against_its_receipt_and_repaired(
    moved: tuple[Path, Path, Path], content: Path, tmp_path: Path
) -> None:
    source, volume, _ = moved
    folder, key = _receipt(volume, tmp_path)
    (tmp_path / "signers").write_text(key.allowed_signers)
    flip(volume, [3, 30 * MIB, SIZE - 1])
    seen = disk("verify", "--receipt", folder, "--key", tmp_path / "signers", volume)
    assert seen.exit_code == 1
    starts = [int(line.split()[3].rstrip(":")) for line in seen.stdout.splitlines()]
    assert [start // BLOCK_BYTES for start in starts] == [0, 7, 10]
    mended = disk("verify", "--receipt", folder, "--volume", "scsi0:0", "--repair", source, volume)
    assert mended.exit_code == 0, mended.output
    assert_same_file(volume, content)


def test_a_receipt_that_is_not_as_it_was_signed_repairs_nothing(moved: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, volume, _ = moved
    folder, _ = _receipt(volume, tmp_path)
    rows = folder / "data/disk0.sha256"
    rows.write_text(rows.read_text().replace("a", "b"))
    result = disk("verify", "--receipt", folder, "--repair", source, volume)
    assert result.exit_code == 1
    assert "the receipt is not as it was signed" in result.stderr
    neither = disk("verify", volume)
    assert neither.exit_code == 2
    assert "give either --ledger or --receipt" in neither.stderr


def test_a_volume_that_qemu_writes_is_not_compared_with_its_receipt(moved: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder, _ = _receipt(moved[1], tmp_path)
    with opened_by_qemu(moved[1]):
        refused = _bounded("receipt", "verify", str(folder), "--volume", f"scsi0:0={moved[1]}")
    assert (refused.returncode, "is in use by a guest" in refused.stderr) == (1, True), refused.stdout + refused.stderr


@pytest.mark.parametrize("line", ["disk verify {volume} --receipt {receipt} --key", "receipt verify {receipt} --key"])
def test_a_key_file_without_an_end_is_not_read_into_memory(moved: tuple[Path, Path, Path], tmp_path: Path, line: str) -> None:
    folder, _ = _receipt(moved[1], tmp_path)
    refused = _bounded(*line.format(volume=moved[1], receipt=folder).split(), "/dev/zero")
    assert (refused.returncode, "/dev/zero is larger than 64 MiB" in refused.stderr) == (2, True), refused.stderr


def test_a_ledger_without_a_line_end_is_not_read_into_memory(moved: tuple[Path, Path, Path]) -> None:
    refused = _bounded("disk", "verify", str(moved[1]), "--ledger", "/dev/zero")
    assert (refused.returncode, "line 1 is not a line of a ledger" in refused.stderr) == (1, True), refused.stderr


def _bounded(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with a bound on its memory: without a limit of its own it fails there, and not this machine."""
    program = "import sys; from synvirt.__main__ import main; main()"
    argv = ["prlimit", f"--as={2 << 30}", sys.executable, "-c", program, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _receipt(volume: Path, tmp_path: Path) -> tuple[Path, HostKey]:
    receipts, token, job_id = Receipts(tmp_path / "kept", HostKey(tmp_path / "key", "kvm1")), uuid4(), UUID(int=1)
    path = receipts.hashes_file(job_id, 0)
    hashes = BlockHashes(path, SIZE, token)
    hashes.fill(open_reader(RawSpec(path=str(volume))))
    hashes.close()
    job = MovedJob(job_id, {"job": {"id": str(job_id)}}, b"{}\n", (CopiedDisk("scsi0:0", "web", "web-0", SIZE, path),), token)
    receipts.make(job)
    with receipts.path_of(job_id).open("rb") as tar:
        return unpack(tar, tmp_path / "unpacked", f"receipt-{job_id}"), receipts.key


def _ledger_of(path: Path) -> Ledger:
    hashing = Hashing(open_reader(RawSpec(path=str(path))))
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for extent in hashing.extents():
        if not extent.zero:
            for start in range(extent.start, extent.end, BLOCK_BYTES):
                hashing.read_into(start, buffer[: min(BLOCK_BYTES, extent.end - start)])
    ledger = hashing.ledger("disk.raw")
    hashing.close()
    return ledger


def test_a_file_that_is_no_ledger_is_said_to_be_none(moved: tuple[Path, Path, Path]) -> None:
    """Before, it was E_MIG_NOT_FOUND, with Python's words of a codec."""
    _, volume, ledger = moved
    ledger.write_bytes(b"\xe7\x00\xff" * 99)
    result = disk("verify", "--ledger", ledger, volume)
    assert result.exit_code == 1
    assert result.stderr.startswith("E_MIG_MALFORMED_ARCHIVE: ledger is not a ledger: it is not a text in UTF-8")
    assert "codec" not in result.stderr
