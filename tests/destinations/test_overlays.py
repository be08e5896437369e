"""A law: whatever the order of passes, clones, crashes and their ends, a volume and its side file are the disk; each overlay is
the disk of its moment; and in the end there is only the volume."""

import contextlib
import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from synvirt.blocks import DiskWriter
from synvirt.destinations import overlays
from synvirt.disks import open_reader, open_writer
from synvirt.disks.specs import AsideWriterSpec, ImageSpec, RawSpec, ReaderSpec, written
from synvirt.errors import DiskWriteFailed
from synvirt.sizes import KIB
from tests.fakes.clones import OverlayingDirectory
from tests.needs import need_root

SIZE = 4 * 64 * KIB + 1000
JOB = UUID(int=1)


def content(spec: ReaderSpec) -> bytes:
    buffer = bytearray(SIZE)
    with contextlib.closing(open_reader(spec)) as reader:
        reader.read_into(0, memoryview(buffer))
    return bytes(buffer)


class Rehearsed(RuleBasedStateMachine):
    """`disk`: what the source has had copied. `since`: what the pass under way wrote after its last watermark."""

    clones = Bundle("clones")

    def __init__(self) -> None:
        super().__init__()
        self._temporary = TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.destination = OverlayingDirectory(self.folder)
        self.name = self.destination.volume_name(JOB, "disk")
        self.disk = bytearray(SIZE)
        self.moments: dict[str, bytes] = {}
        self.writer: DiskWriter | None = None
        self.since: list[tuple[int, bytes]] = []

    def teardown(self) -> None:
        self._end_pass()
        for to in self.moments:
            self.destination.unclone(self.name, to)
        self.destination.release(self.name)
        open_writer(self.destination.open(self.name, SIZE)).close()
        self.destination.release(self.name)
        assert Path(self.destination.device(self.name)).read_bytes() == self.disk
        assert [path.name for path in self.folder.rglob("*") if path.is_file()] == ["disk.raw"]
        self.destination.destroy(self.name)
        assert list(self.folder.iterdir()) == []
        self._temporary.cleanup()

    @initialize()
    def made(self) -> None:
        self.destination.create(self.name, SIZE)

    @rule(
        offset=st.integers(0, SIZE - 1) | st.sampled_from(range(0, SIZE, 64 * KIB)),
        length=st.integers(1, 150 * KIB) | st.sampled_from([64 * KIB, 128 * KIB]),
        seed=st.integers(0, 3),
    )
    def write(self, offset: int, length: int, seed: int) -> None:
        """Of a pass, the one under way or the next."""
        self.writer = self.writer or open_writer(self.destination.open(self.name, SIZE))
        data = (random.Random(seed).randbytes(length) if seed else bytes(length))[: SIZE - offset]
        if seed:
            self.writer.write(offset, memoryview(data))
        else:
            self.writer.zero(offset, len(data))
        self.disk[offset : offset + len(data)] = data
        self.since.append((offset, data))

    @precondition(lambda self: self.writer is not None)
    @rule()
    def watermark(self) -> None:
        assert self.writer is not None
        self.writer.flush()
        self.since.clear()

    @rule()
    def end_pass(self) -> None:
        self._end_pass()

    @rule()
    def crash(self) -> None:
        """The service is started again, and the pass goes on from its watermark."""
        self.destination = OverlayingDirectory(self.folder)
        if self.writer is not None:
            self.writer.close()
            self.writer = open_writer(self.destination.open(self.name, SIZE))
            for offset, data in self.since:
                self.writer.write(offset, memoryview(data))

    @rule(target=clones)
    def rehearse(self) -> str:
        self._end_pass()
        spec = self.destination.open(self.name, SIZE)
        to = self.destination.volume_name(uuid4(), "disk")
        if isinstance(spec, AsideWriterSpec) and not spec.folds and any(Path(spec.marks).read_bytes()):
            with pytest.raises(DiskWriteFailed, match="not folded"):
                self.destination.clone(self.name, to)
            assert not Path(self.destination.device(to)).parent.exists()
            return to
        if isinstance(spec, AsideWriterSpec) and spec.folds:
            open_writer(spec).close()
        self.destination.clone(self.name, to)
        self.moments[to] = bytes(self.disk)
        return to

    @rule(to=consumes(clones))
    def sweep(self, to: str) -> None:
        """At any time, during a pass too."""
        for _ in range(2):
            self.destination.unclone(self.name, to)
        self.moments.pop(to, None)

    @invariant()
    def each_overlay_is_the_disk_of_its_moment(self) -> None:
        for to, moment in self.moments.items():
            path = self.destination.device(to)
            assert content(ImageSpec(format="qcow2", over=RawSpec(path=path), root="/", name=path[1:])) == moment
            assert self.destination.backing_file(self.name, to) == self.destination.device(self.name)

    @precondition(lambda self: not self.since and Path(self.destination.device(self.name)).exists())
    @invariant()
    def both_are_the_disk(self) -> None:
        assert content(written(self.destination.open(self.name, SIZE))) == self.disk

    def _end_pass(self) -> None:
        if self.writer is not None:
            self.writer.flush()
            self.writer.close()
            self.writer = None
        self.since.clear()


TestRehearsed = Rehearsed.TestCase
TestRehearsed.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_volume_belongs_to_qemu_only_while_an_overlay_of_it_is_there(tmp_path: Path) -> None:
    """libvirt gives it away when the guest starts, and does not take it back."""
    need_root("another user")
    destination = OverlayingDirectory(tmp_path)
    name, *clones = (destination.volume_name(job, "disk") for job in (JOB, uuid4(), uuid4()))
    destination.create(name, SIZE)
    path = Path(destination.device(name))
    for to in clones:
        destination.clone(name, to)
    os.chown(path, 65534, 65534)
    destination.unclone(name, clones[0])
    assert path.stat().st_uid == 65534, "the other guest reads it"
    destination.unclone(name, clones[1])
    assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), os.getegid())


def test_a_crash_leaves_a_side_file_only_with_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them is nothing, and is made again."""
    destination = OverlayingDirectory(tmp_path)
    name, to = destination.volume_name(JOB, "disk"), destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    destination.clone(name, to)
    real = overlays._make_file
    made: list[Path] = []

    def killed(path: Path, length: int) -> None:
        if made:
            raise KeyboardInterrupt
        made.append(path)
        real(path, length)

    monkeypatch.setattr(overlays, "_make_file", killed)
    with pytest.raises(KeyboardInterrupt):
        destination.open(name, SIZE)
    monkeypatch.undo()
    with contextlib.closing(open_writer(destination.open(name, SIZE))) as writer:
        writer.write(0, memoryview(b"aside"))
        writer.flush()
    assert content(written(destination.open(name, SIZE)))[:5] == b"aside"
    assert not any(Path(destination.device(name)).read_bytes())
    destination.destroy(name)
    destination.unclone(name, to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", range(1, 4))
def test_an_overlay_that_goes_while_the_volume_is_opened_takes_no_side_file_with_it(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal is swept in a thread of its own: before the n-th look at what is in the folder."""
    destination = OverlayingDirectory(tmp_path)
    name, to = destination.volume_name(JOB, "disk"), destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    destination.clone(name, to)
    looks = 0

    def looked(found: Callable[[Path], Any], volume: Path) -> Any:
        nonlocal looks
        looks += 1
        if looks == moment:
            monkeypatch.undo()
            destination.unclone(name, to)
        return found(volume)

    for one in ("_all_held", "_is_there"):
        monkeypatch.setattr(overlays, one, functools.partial(looked, getattr(overlays, one)))
    data = random.Random(moment).randbytes(SIZE)
    with contextlib.closing(open_writer(destination.open(name, SIZE))) as writer:
        writer.write(0, memoryview(data))
        writer.flush()
    open_writer(destination.open(name, SIZE)).close()
    assert content(written(destination.open(name, SIZE))) == data
