"""What the worker of a repair does before it compares, and reports of that. The repair: tests/migrations/test_repairing.py."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.disks.checking.receipt_rows import LedgerSpec
from synvirt.disks.specs import FileWriterSpec, RawSpec, ReaderSpec, WriterSpec
from synvirt.jobs import copying_disks
from synvirt.jobs.orders import DIFFERING, PREPARING, DiskRepairOrder, Noted, RepairOrder
from synvirt.jobs.wire import Flushed, Message, Result
from synvirt.sizes import MIB
from tests.fakes.workers import in_process
from tests.jobs.test_copying_disks import Behind, behind, written_beside

SIZE = BLOCK_BYTES + MIB


def ledger(folder: Path, content: bytes) -> LedgerSpec:
    """Of a receipt of a disk with this content."""
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    rows = "".join(f"{hashlib.sha256(block).hexdigest()}  {number}\n" for number, block in enumerate(blocks)).encode()
    (folder / "ledger").write_bytes(rows)
    signed = hashlib.sha256(rows).hexdigest()
    path = str(folder / "ledger")
    return LedgerSpec(path=path, offset=0, length=len(rows), sha256=signed, disk="disk-0", size_bytes=len(content))


def repaired(folder: Path, content: bytes, volume: WriterSpec, source: ReaderSpec) -> list[Message]:
    """All that the worker says."""
    heard: list[Message] = []

    async def carry_out() -> None:
        async with in_process() as worker:

            async def on_message(message: Message) -> None:
                heard.append(message)
                if isinstance(message, Result) and message.name == DIFFERING:
                    await worker.send(Noted(key="disk-0"))

            disk = DiskRepairOrder(key="disk-0", ledger=ledger(folder, content), volume=volume, source=source)
            (await worker.carry_out(RepairOrder(disks=(disk,)), on_message, lambda: False)).check()

    asyncio.run(carry_out())
    return heard


def names(said: list[Message]) -> list[str]:
    """Of the results, in their order."""
    return [one.name for one in said if isinstance(one, Result)]


def test_what_lies_beside_the_volume_is_folded_before_that_is_compared(tmp_path: Path) -> None:
    """A reader that was opened before looks for it in the side file, where zeros are by then: right blocks would differ, and
    stay so after each repair."""
    content = Random(1).randbytes(SIZE)
    beside = written_beside(tmp_path, content)
    (tmp_path / "source").write_bytes(content)
    said = repaired(tmp_path, content, replace(beside, folds=True), RawSpec(path=str(tmp_path / "source")))
    assert said[0] == Result(name=PREPARING, content={})
    assert names(said) == [PREPARING], "nothing differs"
    assert isinstance(said[-1], Flushed)
    assert said[-1].finished
    assert (tmp_path / "volume").read_bytes() == content


@pytest.mark.parametrize("what", ["other disks", "its end"])
def test_what_comes_before_what_is_read_of_the_source_is_reported(
    what: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying_disks, "PROGRESS_EVERY_S", 0)
    content = Random(2).randbytes(SIZE)
    (tmp_path / "volume").write_bytes(content[: BLOCK_BYTES + 5] + b"damaged" + content[BLOCK_BYTES + 12 :])
    volume = FileWriterSpec(path=str(tmp_path / "volume"), size_bytes=SIZE)
    said = names(repaired(tmp_path, content, volume, behind(what, tmp_path, content)))
    before, after = said[: said.index(DIFFERING)], said[said.index(DIFFERING) + 1 :]
    assert len(before) > 1
    assert set(before) == {PREPARING}
    # An archive sends the disk from its start; of a gzip file the states are known by then.
    assert after == ([PREPARING] if what == "other disks" else [])
    assert (tmp_path / "volume").read_bytes() == content
