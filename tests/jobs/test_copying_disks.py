"""What a worker says of a disk is true when it says it: it may be killed right after."""

import asyncio
import gzip
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal
from uuid import uuid4

import pytest

from synvirt.disks import open_writer
from synvirt.disks.checking.block_hashes import known_digests
from synvirt.disks.raw.aside import marks_bytes
from synvirt.disks.specs import AsideWriterSpec, ChangedSpec, FileWriterSpec, GzipSpec, RawSpec, ReaderSpec, XvaSpec
from synvirt.jobs import copying_disks
from synvirt.jobs.orders import PREPARING, CopyOrder, DiskOrder, HashesOrder
from synvirt.jobs.process import WorkerDied
from synvirt.jobs.wire import Flushed, Message, Result
from synvirt.sizes import MIB
from tests.disks.xva import xva_archives
from tests.fakes.workers import in_process
from tests.running.processes import until

SIZE, SINCE = 5 * MIB, 4 * MIB + 4096


def carried_out(
    order: CopyOrder, said: list[Message] | None = None, stopped: Callable[[], bool] = lambda: False
) -> list[Message]:
    """All that the worker says, added to `said`. The error that it ends with."""
    heard = [] if said is None else said

    async def on_message(message: Message) -> None:
        heard.append(message)

    async def carry_out() -> None:
        async with in_process() as worker:
            (await worker.carry_out(order, on_message, stopped)).check()

    asyncio.run(carry_out())
    return heard


def resumed(folder: Path, content: bytes) -> DiskOrder:
    """A disk in a packed archive, as of an interrupted copy onto a volume; here that is empty."""
    path = xva_archives.packed(xva_archives.archive(folder / "a.xva", b"<x/>", {"Ref:4": content}), "gzip")
    reader = XvaSpec(over=RawSpec(path=str(path)), folder="Ref:4", size_bytes=SIZE, packing="gzip")
    (folder / "volume").write_bytes(bytes(SIZE))
    writer = FileWriterSpec(path=str(folder / "volume"), size_bytes=SIZE)
    return DiskOrder(key="disk-0", reader=reader, writer=writer, since_bytes=SINCE, fresh=False)


Behind = Literal["other disks", "its end"]


def behind(what: Behind, folder: Path, content: bytes) -> ReaderSpec:
    """A disk of which nothing can be read before as much as it has itself: the disk before it in a packed archive, or all of
    its gzip file."""
    if what == "its end":
        (folder / "a.gz").write_bytes(gzip.compress(content, 1))
        return GzipSpec(over=RawSpec(path=str(folder / "a.gz")), size_max_bytes=len(content))
    disks = {"Ref:3": Random(5).randbytes(len(content)), "Ref:4": content}
    path = xva_archives.packed(xva_archives.archive(folder / "a.xva", b"<x/>", disks), "gzip", "-1")
    return XvaSpec(over=RawSpec(path=str(path)), folder="Ref:4", size_bytes=len(content), packing="gzip")


def from_behind(what: Behind, folder: Path, content: bytes) -> CopyOrder:
    """A first copy of it, at a shared rate."""
    (folder / "volume").write_bytes(bytes(len(content)))
    writer = FileWriterSpec(path=str(folder / "volume"), size_bytes=len(content))
    return CopyOrder(disks=(DiskOrder(key="disk-0", reader=behind(what, folder, content), writer=writer),), shared_bytes=MIB)


def test_the_hashes_of_a_disk_that_is_said_to_be_finished_are_believed(tmp_path: Path) -> None:
    """Nobody opens them again for it: who is killed now would leave a file that counts as half written."""
    source, volume, hashes, token = tmp_path / "source", tmp_path / "volume", tmp_path / "hashes", uuid4()
    source.write_bytes(Random(1).randbytes(SIZE))
    volume.touch()
    with volume.open("r+b") as file:
        file.truncate(SIZE)
    order = CopyOrder(
        disks=(
            DiskOrder(
                key="disk-0",
                reader=RawSpec(path=str(source)),
                writer=FileWriterSpec(path=str(volume), size_bytes=SIZE),
                hashes=HashesOrder(path=str(hashes), token=token, last=True),
            ),
        )
    )
    found: list[bool] = []

    class Looking(list[Message]):
        def append(self, message: Message) -> None:
            if isinstance(message, Flushed) and message.finished:
                found.append(known_digests(hashes, SIZE, token) is not None)

    carried_out(order, Looking())
    assert found == [True]


def written_beside(folder: Path, content: bytes) -> AsideWriterSpec:
    """A volume of zeros in that folder, with the content beside it."""
    size, paths = len(content), [str(folder / name) for name in ("volume", "side", "marks")]
    for path, length in zip(paths, (size, size, marks_bytes(size)), strict=True):
        Path(path).write_bytes(bytes(length))
    volume, side, marks = paths
    beside = AsideWriterSpec(path=volume, aside=side, marks=marks, size_bytes=size, folds=False)
    with closing(open_writer(beside)) as writer:
        writer.write(0, memoryview(content))
        writer.flush()
    return beside


def test_a_fold_says_that_it_goes_on(tmp_path: Path) -> None:
    """It may take hours: a worker that says nothing for so long is taken for stalled."""
    content = Random(2).randbytes(SIZE)
    beside = written_beside(tmp_path, content)
    reader = ChangedSpec(over=RawSpec(path=beside.path), areas=())
    disk = DiskOrder(key="disk-0", reader=reader, writer=replace(beside, folds=True), fresh=False)
    said = carried_out(CopyOrder(disks=(disk,)))
    assert said[0] == Result(name=PREPARING, content={})
    assert (tmp_path / "volume").read_bytes() == content


def test_what_a_stream_sends_again_is_read_as_a_copy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the watermark it may take hours: it is reported, it keeps to the limits, and nothing of it is written."""
    monkeypatch.setattr(copying_disks, "PROGRESS_EVERY_S", 0)
    limited: list[int] = []
    monkeypatch.setattr(copying_disks.Share, "take", lambda self, amount: limited.append(amount))
    content = Random(3).randbytes(SIZE)
    disk = resumed(tmp_path, content)
    said = carried_out(CopyOrder(disks=(disk,), shared_bytes=MIB))
    is_preparing = [isinstance(one, Result) and one.name == PREPARING for one in said]
    assert is_preparing[0]
    assert is_preparing == sorted(is_preparing, reverse=True), "afterwards it is a pass"
    assert sum(limited) == SIZE + len(b"<x/>"), "the description lies before the disk"
    assert (tmp_path / "volume").read_bytes() == bytes(SINCE) + content[SINCE:]


def test_reading_a_stream_again_is_cancelled_as_a_copy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_disks, "PROGRESS_EVERY_S", 0)
    asked: list[int] = []

    def take(share: copying_disks.Share, amount: int) -> None:
        asked.append(amount)
        if len(asked) > 1:
            until(share._wire.stop)

    monkeypatch.setattr(copying_disks.Share, "take", take)
    disk = resumed(tmp_path, Random(4).randbytes(SIZE))
    said: list[Message] = []
    with pytest.raises(WorkerDied, match="exit code 1"):
        carried_out(CopyOrder(disks=(disk,), shared_bytes=MIB), said, stopped=lambda: bool(said))
    assert not [one for one in said if isinstance(one, Flushed)]
    assert (tmp_path / "volume").read_bytes() == bytes(SIZE)


@pytest.mark.parametrize("what", ["other disks", "its end"])
def test_what_comes_before_the_first_byte_is_read_as_a_copy_is(
    what: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take hours: a worker that says nothing for so long is taken for stalled."""
    monkeypatch.setattr(copying_disks, "PROGRESS_EVERY_S", 0)
    limited: list[int] = []
    monkeypatch.setattr(copying_disks.Share, "take", lambda self, amount: limited.append(amount))
    content = Random(6).randbytes(SIZE)
    said = carried_out(from_behind(what, tmp_path, content))
    is_preparing = [isinstance(one, Result) and one.name == PREPARING for one in said]
    assert sum(is_preparing) > 1
    assert is_preparing == sorted(is_preparing, reverse=True), "afterwards it is a pass"
    assert sum(limited) >= 2 * SIZE
    assert (tmp_path / "volume").read_bytes() == content


@pytest.mark.parametrize("what", ["other disks", "its end"])
def test_reading_what_comes_before_the_first_byte_is_cancelled_as_a_copy_is(
    what: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying_disks, "PROGRESS_EVERY_S", 0)
    asked: list[int] = []

    def take(share: copying_disks.Share, amount: int) -> None:
        asked.append(amount)
        if sum(asked) > MIB:
            until(share._wire.stop)

    monkeypatch.setattr(copying_disks.Share, "take", take)
    said: list[Message] = []
    order = from_behind(what, tmp_path, Random(7).randbytes(SIZE))
    with pytest.raises(WorkerDied, match="exit code 1"):
        carried_out(order, said, stopped=lambda: bool(said))
    assert {one.name for one in said if isinstance(one, Result)} == {PREPARING}
    assert not [one for one in said if not isinstance(one, Result)], "no pass has begun"
    assert sum(asked) < SIZE
