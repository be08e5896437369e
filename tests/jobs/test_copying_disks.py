"""What a worker says of a disk is true when it says it: it may be killed right after."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import uuid4

from synvirt.disks import open_writer
from synvirt.disks.checking.block_hashes import known_digests
from synvirt.disks.raw.aside import marks_bytes
from synvirt.disks.specs import AsideWriterSpec, ChangedSpec, FileWriterSpec, RawSpec
from synvirt.jobs.orders import FOLDED, CopyOrder, DiskOrder, HashesOrder
from synvirt.jobs.wire import Flushed, Message, Result
from synvirt.sizes import MIB
from tests.fakes.workers import in_process

SIZE = 5 * MIB


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

    async def on_message(message: Message) -> None:
        if isinstance(message, Flushed) and message.finished:
            found.append(known_digests(hashes, SIZE, token) is not None)

    async def carry_out() -> None:
        async with in_process() as worker:
            (await worker.carry_out(order, on_message, lambda: False)).check()

    asyncio.run(carry_out())
    assert found == [True]


def test_a_fold_says_that_it_goes_on(tmp_path: Path) -> None:
    """It may take hours: a worker that says nothing for so long is taken for stalled."""
    content = Random(2).randbytes(SIZE)
    for name, size in (("volume", SIZE), ("side", SIZE), ("marks", marks_bytes(SIZE))):
        (tmp_path / name).write_bytes(bytes(size))
    volume, side, marks = (str(tmp_path / name) for name in ("volume", "side", "marks"))
    beside = AsideWriterSpec(path=volume, aside=side, marks=marks, size_bytes=SIZE, folds=False)
    with closing(open_writer(beside)) as writer:
        writer.write(0, memoryview(content))
        writer.flush()
    reader = ChangedSpec(over=RawSpec(path=volume), areas=())
    disk = DiskOrder(key="disk-0", reader=reader, writer=replace(beside, folds=True), fresh=False)
    said: list[Message] = []

    async def on_message(message: Message) -> None:
        said.append(message)

    async def carry_out() -> None:
        async with in_process() as worker:
            (await worker.carry_out(CopyOrder(disks=(disk,)), on_message, lambda: False)).check()

    asyncio.run(carry_out())
    assert said[0] == Result(name=FOLDED, content={})
    assert (tmp_path / "volume").read_bytes() == content
