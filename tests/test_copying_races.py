"""What is reported as durable, at the moments of the copy loop that are too short to be met by chance."""

import threading
import time

import pytest

from synvirt import copying
from synvirt.copying import Copied, copy
from synvirt.errors import DiskWriteFailed
from tests.fakes.disks import BLOCK_BYTES, MemoryReader, MemoryWriter
from tests.running.processes import until


def test_a_request_is_before_no_watermark_from_the_moment_at_which_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may stand still between taking a request and saying which."""
    passes: list[copying._Pass] = []
    seen: list[tuple[int, int]] = []
    take = copying._Plan.take

    class Watched(copying._Pass):
        def work(self, slot: int) -> None:
            passes.append(self)
            super().work(slot)

    def taken(plan: copying._Plan) -> copying._Request | None:
        request = take(plan)
        if request is not None:
            seen.append((passes[0].copied().watermark, request.start))
        return request

    monkeypatch.setattr(copying, "REQUEST_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(copying, "_Pass", Watched)
    monkeypatch.setattr(copying._Plan, "take", taken)
    copy(MemoryReader("AB" * 20), MemoryWriter(40 * BLOCK_BYTES), threads=2)
    assert len(seen) == 10
    assert all(watermark <= start for watermark, start in seen)


def test_a_flush_that_fails_when_all_is_copied_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a failed write-back once: the last flush would succeed."""

    class FailsOnce(MemoryWriter):
        def flush(self) -> None:
            self.flushes += 1
            if self.flushes == 1:
                until(
                    lambda: (
                        not any(
                            thread.name.startswith("copy-") and thread.name[5:].isdecimal() for thread in threading.enumerate()
                        )
                    )
                )
                time.sleep(0.05)  # the one that waits for the threads goes on
                raise DiskWriteFailed("lost")

    monkeypatch.setattr(copying, "REQUEST_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(copying, "PROGRESS_EVERY_S", 0.002)
    marks: list[Copied] = []
    writer = FailsOnce(80 * BLOCK_BYTES)
    with pytest.raises(DiskWriteFailed, match="lost"):
        copy(MemoryReader("AB" * 40, seconds=0.005), writer, threads=2, flush_every_s=0, on_watermark=marks.append)
    assert (writer.flushes, marks) == (1, [])
