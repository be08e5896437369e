"""What a worker says of a disk is true when it says it: it may be killed right after."""

import asyncio
from pathlib import Path
from random import Random
from uuid import uuid4

from synvirt.disks.checking.block_hashes import known_digests
from synvirt.disks.specs import FileWriterSpec, RawSpec
from synvirt.jobs.orders import CopyOrder, DiskOrder, HashesOrder
from synvirt.jobs.wire import Flushed, Message
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
