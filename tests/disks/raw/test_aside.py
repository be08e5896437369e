"""A volume with a side file: together they are the disk, whatever is interrupted; and the volume itself stays."""

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from synvirt.disks import open_reader, open_writer
from synvirt.disks.raw import aside
from synvirt.disks.raw.aside import AsideReader, AsideWriter, Marks, block_bytes, fold, marks_bytes
from synvirt.disks.specs import AsideSpec, AsideWriterSpec, written
from synvirt.errors import Cancelled, DiskReadFailed, DiskWriteFailed
from synvirt.sizes import GIB, KIB, MIB, TIB
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.contracts.writers import WriterCase, WriterContract

SIZE = 3 * MIB + 513


def spec(folder: Path, size: int = SIZE, *, folds: bool = False) -> AsideWriterSpec:
    for name, length in (("volume", size), ("side", size), ("marks", marks_bytes(size))):
        path = folder / name
        path.touch()
        os.truncate(path, length)
    return AsideWriterSpec(
        path=str(folder / "volume"), aside=str(folder / "side"), marks=str(folder / "marks"), size_bytes=size, folds=folds
    )


def content(one: AsideWriterSpec) -> bytes:
    buffer = bytearray(one.size_bytes)
    with contextlib.closing(open_reader(written(one))) as reader:
        reader.read_into(0, memoryview(buffer))
    return bytes(buffer)


class TestWriter(WriterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> WriterCase:
        one = spec(tmp_path)
        return WriterCase(open=lambda: open_writer(one), content=lambda: content(one))


class TestReader(ReaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> ReaderCase:
        one, made = spec(tmp_path), random.Random(1)
        disk = bytearray(made.randbytes(SIZE))
        disk[MIB : 2 * MIB] = bytes(MIB)
        Path(one.path).write_bytes(disk)
        with contextlib.closing(open_writer(one)) as writer:
            for offset, length in ((1000, 3), (200 * KIB, 150 * KIB), (MIB + 7, 64 * KIB), (SIZE - 5, 5)):
                data = made.randbytes(length)
                writer.write(offset, memoryview(data))
                disk[offset : offset + length] = data
            writer.zero(2 * MIB, 300 * KIB)
            disk[2 * MIB : 2 * MIB + 300 * KIB] = bytes(300 * KIB)
            writer.flush()
        return ReaderCase(open=lambda: open_reader(written(one)), content=bytes(disk))


class Passes(RuleBasedStateMachine):
    """A disk that passes write, while its volume must stay or need not. A crash loses at most what no flush has kept; the pass
    that was interrupted then writes that again."""

    SIZE = 5 * 64 * KIB + 700

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.spec = spec(Path(self._folder.name), self.SIZE)
        self.disk, self.kept = bytearray(self.SIZE), b""
        self.writer: AsideWriter | None = None
        # What the pass has written since its last flush.
        self.since: list[tuple[int, bytes]] = []

    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self._folder.cleanup()

    @initialize(seed=st.integers(0, 1 << 16))
    def copied_once(self, seed: int) -> None:
        self.disk[:] = random.Random(seed).randbytes(self.SIZE)
        Path(self.spec.path).write_bytes(self.disk)
        self.kept = bytes(self.disk)

    @rule(
        offset=st.integers(0, SIZE) | st.sampled_from(range(0, SIZE, 64 * KIB)),
        length=st.integers(1, 150 * KIB) | st.sampled_from([64 * KIB, 128 * KIB]),
        seed=st.integers(0, 3),
    )
    def write(self, offset: int, length: int, seed: int) -> None:
        self.writer = self.writer or AsideWriter(self.spec)
        offset %= self.SIZE
        data = random.Random(seed).randbytes(length)[: self.SIZE - offset] if seed else bytes(min(length, self.SIZE - offset))
        if seed:
            self.writer.write(offset, memoryview(data))
        else:
            self.writer.zero(offset, len(data))
        self.disk[offset : offset + len(data)] = data
        self.since.append((offset, data))

    @rule()
    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()
            self.since.clear()

    @rule()
    def crash(self) -> None:
        """Its next worker writes again what came after the last watermark."""
        if self.writer is not None:
            self.writer.close()
            self.writer = AsideWriter(self.spec)
            for offset, data in self.since:
                self.writer.write(offset, memoryview(data))

    @precondition(lambda self: not self.since)
    @rule(interrupted=st.sampled_from(["", "at once", "soon", "killed", "after"]))
    def fold(self, interrupted: str) -> None:
        """Nobody needs the volume as it was: it becomes the disk; and is what the next guest sees."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        if interrupted in ("at once", "soon"):
            stops = iter([False] * (4 if interrupted == "soon" else 0))
            with contextlib.suppress(Cancelled):
                fold(self.spec, stop=lambda: next(stops, True))
            assert content(self.spec) == self.disk
        if interrupted == "killed":  # some of it was copied
            for at in range(0, self.SIZE, 128 * KIB):
                with Path(self.spec.path).open("r+b") as volume:
                    volume.seek(at)
                    volume.write(content(self.spec)[at : at + 64 * KIB])
            assert content(self.spec) == self.disk
        fold(self.spec)
        if interrupted == "after":
            fold(self.spec)
        self.kept = Path(self.spec.path).read_bytes()
        assert self.kept == self.disk
        assert not any(Path(self.spec.marks).read_bytes())

    @invariant()
    def the_volume_stays(self) -> None:
        if self.kept:
            assert Path(self.spec.path).read_bytes() == self.kept

    @precondition(lambda self: not self.since and self.kept)
    @invariant()
    def both_are_the_disk(self) -> None:
        assert content(self.spec) == self.disk


TestPasses = Passes.TestCase


def test_a_fold_opens_the_volume_itself(tmp_path: Path) -> None:
    with contextlib.closing(open_writer(spec(tmp_path))) as writer:
        writer.write(5, memoryview(b"aside"))
        writer.flush()
    assert not any((tmp_path / "volume").read_bytes())
    with contextlib.closing(open_writer(spec(tmp_path, folds=True))) as writer:
        assert (tmp_path / "volume").read_bytes()[5:10] == b"aside"
        writer.write(5, memoryview(b"ASIDE"))
    assert (tmp_path / "volume").read_bytes()[5:10] == b"ASIDE"


def test_what_only_a_crash_has_left_in_the_side_file_is_nothing(tmp_path: Path) -> None:
    one = spec(tmp_path)
    (tmp_path / "side").write_bytes(b"x" * SIZE)  # written, and never marked
    assert not any(content(one))
    with contextlib.closing(open_writer(one)) as writer:
        writer.write(70_000, memoryview(b"a part of a block"))
        writer.flush()
    expected = bytearray(SIZE)
    expected[70_000:70_017] = b"a part of a block"
    assert content(one) == expected


def test_marks_come_after_what_they_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any crash each mark on the disk is of a block that is in the side file: also where others write during the flush."""
    one, synced = spec(tmp_path), []
    real = os.fdatasync

    def noted(descriptor: int) -> None:
        real(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if len(synced) == 1:
            writer.write(2 * MIB, memoryview(b"y" * MIB))

    monkeypatch.setattr(os, "fdatasync", noted)
    with contextlib.closing(open_writer(one)) as writer:
        writer.write(0, memoryview(b"x" * MIB))
        writer.flush()
        assert synced == ["side", "marks"]
        assert list(Marks(one.marks, SIZE).runs(0, SIZE)) == [(0, MIB, True), (MIB, SIZE, False)]
        writer.flush()
    assert synced == ["side", "marks"] * 2
    assert (0 in (marks := Marks(one.marks, SIZE)), 16 in marks, 32 in marks) == (True, False, True)


def test_a_block_is_marked_only_once_it_is_in_the_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may flush at any moment."""
    one = spec(tmp_path)
    with contextlib.closing(AsideWriter(one)) as writer:
        for name in ("write", "zero"):
            real = getattr(writer._side, name)

            def late(*args: object, real: Callable[..., None] = real) -> None:
                writer.flush()
                real(*args)

            monkeypatch.setattr(writer._side, name, late)
        writer.write(0, memoryview(b"x" * MIB))
        assert not any(Path(one.marks).read_bytes())
        writer.zero(MIB, MIB)
        assert list(Marks(one.marks, SIZE).runs(0, SIZE)) == [(0, MIB, True), (MIB, SIZE, False)]


def test_a_part_of_a_block_is_not_lost_to_one_who_writes_another_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests may meet in a block: what was there before comes into the side file once, and first."""
    one = spec(tmp_path)
    with contextlib.closing(AsideWriter(one)) as writer:
        real = writer._side.write

        def beside(offset: int, buffer: memoryview) -> None:
            real(offset, buffer)
            if bytes(buffer) == b"first":
                writer.write(100, memoryview(b"second"))

        monkeypatch.setattr(writer._side, "write", beside)
        writer.write(10, memoryview(b"first"))
    assert (tmp_path / "side").read_bytes()[:106] == bytes(10) + b"first" + bytes(85) + b"second"


@pytest.mark.parametrize("size", [1, MIB, GIB, TIB, TIB + 1, 64 * TIB])
def test_marks_of_any_disk_fit_into_memory(size: int) -> None:
    assert marks_bytes(size) <= 16 * MIB
    assert (marks_bytes(size) - 1) * block_bytes(size) < size <= marks_bytes(size) * block_bytes(size)


@pytest.fixture
def without(tmp_path: Path, request: pytest.FixtureRequest) -> AsideWriterSpec:
    one = spec(tmp_path)
    (tmp_path / request.param).unlink()
    return one


@pytest.mark.parametrize("without", ["volume", "side", "marks"], indirect=True)
def test_a_missing_file_is_named_and_nothing_stays_open(without: AsideWriterSpec) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for call in (lambda: AsideWriter(without), lambda: open_reader(written(without)), lambda: fold(without)):
        with pytest.raises((DiskWriteFailed, DiskReadFailed), match=r"volume|side|marks"):
            call()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_marks_that_cannot_be_kept_fail_the_flush(tmp_path: Path) -> None:
    one = spec(tmp_path)
    with contextlib.closing(open_writer(one)) as writer:
        writer.write(0, memoryview(b"x"))
        (tmp_path / "marks").unlink()
        with pytest.raises(DiskWriteFailed, match="marks cannot be written") as caught:
            writer.flush()
        assert caught.value.hint


def test_zeros_are_folded_too(tmp_path: Path) -> None:
    one = spec(tmp_path)
    Path(one.path).write_bytes(b"x" * SIZE)
    with contextlib.closing(open_writer(one)) as writer:
        writer.zero(64 * KIB, MIB)
        writer.write(2 * MIB, memoryview(bytes(128 * KIB)))
        writer.flush()
    fold(one)
    expected = bytearray(b"x" * SIZE)
    expected[64 * KIB : 64 * KIB + MIB] = bytes(MIB)
    expected[2 * MIB : 2 * MIB + 128 * KIB] = bytes(128 * KIB)
    assert Path(one.path).read_bytes() == expected


def test_only_what_is_aside_is_folded(tmp_path: Path) -> None:
    one = spec(tmp_path)
    with contextlib.closing(open_writer(one)) as writer:
        writer.zero(128 * KIB, 64 * KIB)
        writer.write(MIB, memoryview(b"x" * 64 * KIB))
        writer.flush()
    reader = AsideReader(AsideSpec(path=one.path, aside=one.aside, marks=one.marks, size_bytes=one.size_bytes), only_aside=True)
    with contextlib.closing(reader):
        assert [(one.start, one.length) for one in reader.extents()] == [(128 * KIB, 64 * KIB), (MIB, 64 * KIB)]
    assert list(Marks(one.marks, SIZE).runs(100, 200)) == [(100, 200, False)]
    assert aside.BLOCK_BYTES == 64 * KIB


def test_a_volume_that_cannot_be_read_is_an_error_of_the_write(tmp_path: Path) -> None:
    one = spec(tmp_path)
    with contextlib.closing(open_writer(one)) as writer:
        os.truncate(one.path, MIB)
        writer.write(2 * MIB, memoryview(bytes(64 * KIB)))
        with pytest.raises(DiskWriteFailed, match=f"volume: the block at offset {2 * MIB + 64 * KIB} .* ends before offset"):
            writer.write(2 * MIB + 64 * KIB + 7, memoryview(b"x"))
