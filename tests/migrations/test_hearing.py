"""What is made of a worker's messages: of any, in any order."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.http_answers import LEAST_BYTES
from synvirt.jobs.wire import Flushed, Moved
from synvirt.migrations import hearing
from synvirt.migrations.hearing import Clock, Listener, Tally, disk_progress
from synvirt.model.job import DiskProgress, Pass
from synvirt.store import Watermark
from tests.cases import cases

DISKS = ("a", "b", "c")
BEFORE = {"a": (1000, 300), "b": (7, 7)}
NUMBER = 3
keys, counts = st.sampled_from(DISKS[:2]), st.integers(0, 20)
offsets = counts | st.integers(0, 3 * LEAST_BYTES)
moved = st.builds(Moved, key=keys, bytes_total=counts, bytes_done=counts, bytes_zero=counts)
flushed = st.builds(
    Flushed,
    key=keys,
    offset_bytes=offsets,
    bytes_total=counts,
    bytes_done=counts,
    bytes_zero=counts,
    finished=st.booleans(),
    bytes_checked=st.integers(0, 3),
)
messages = st.lists(moved | flushed, max_size=12)


def mark_of(message: Flushed, number: int = NUMBER) -> Watermark:
    return Watermark(
        message.key,
        number,
        message.offset_bytes,
        message.bytes_total,
        message.bytes_done,
        message.bytes_zero,
        message.finished,
    )


class Job:
    """It keeps what is asked of it."""

    def __init__(self) -> None:
        disks = tuple(DiskProgress(key=key, label=key) for key in DISKS)
        passes = tuple(Pass(number=number, kind="delta", bytes=number) for number in (1, 2, NUMBER, 4))
        self.id, self.migration = UUID(int=1), SimpleNamespace(disks=disks, passes=passes, state="CopyingFull")
        self.marks: list[Watermark] = []
        self.overs = 0
        self.rooms = SimpleNamespace(board=SimpleNamespace(pin=lambda *_: None))

    async def change(self, mark: Watermark, **named: Any) -> None:
        self.marks.append(mark)
        vars(self.migration).update(named)

    async def over(self) -> None:
        self.overs += 1


@given(known=st.lists(flushed, max_size=3), heard=messages)
@cases(100)
def test_each_flush_is_a_watermark_and_enough_of_them_are_progress(known: list[Flushed], heard: list[Moved | Flushed]) -> None:
    job: Any = Job()
    tally = Tally(before=BEFORE)
    tally.take_up({one.key: mark_of(one) for one in known})
    highest = {one.key: one.offset_bytes for one in known}
    patience: Any = SimpleNamespace(over=job.over)
    listener = Listener(job, NUMBER, tally, Clock(2.5), patience)

    async def listened() -> None:
        overs, gained, marks = 0, 0, []
        for message in heard:
            await listener.on_message(message)
            if isinstance(message, Flushed):
                marks.append(mark_of(message))
                assert [one.bytes for one in job.migration.passes] == [1, 2, tally.moved_bytes(), 4]
                rise = max(0, message.offset_bytes - highest.get(message.key, 0))
                highest[message.key] = highest.get(message.key, 0) + rise
                gained += rise
                overs += bool(rise and (message.finished or gained >= LEAST_BYTES))
            # It is there on return.
            assert (job.marks, listener.moved, job.overs) == (marks, overs > 0, overs)
        listener.begin_attempt()
        assert not listener.moved

    asyncio.run(listened())


@given(heard=messages)
@cases(100)
def test_the_figures_are_those_of_the_last_report_and_a_flush_takes_none_of_them_back(heard: list[Moved | Flushed]) -> None:
    """It tells of the moment when it began. One that finishes its disk tells all."""
    tally, shown = Tally(before=BEFORE), dict[str, Moved | Flushed]()
    for message in heard:
        tally.take(message)
        last = shown.get(message.key)
        is_past = isinstance(message, Flushed) and not message.finished and last and last.bytes_done > message.bytes_done
        counted = last if last and is_past else message
        figures = {name: getattr(counted, name) for name in ("bytes_total", "bytes_done", "bytes_zero")}
        shown[message.key] = replace(message, **figures)
    assert tally.disks == shown
    finished = {key for key, one in shown.items() if isinstance(one, Flushed) and one.finished}
    checked = [one.bytes_checked for one in shown.values() if isinstance(one, Flushed)]
    assert tally.moved_bytes() == sum(one.bytes_done for one in shown.values())
    assert tally.checked_bytes() == sum(checked)
    assert tally.least_checked_bytes() == min(filter(None, checked), default=0)
    for one in disk_progress(Job().migration.disks, tally):
        heard_of, (done, zero) = shown.get(one.key), BEFORE.get(one.key, (0, 0))
        if heard_of is None:
            assert (one.state, one.bytes_done) == ("waiting", 0)
            continue
        assert one.state == ("copied" if one.key in finished else "copying")
        assert (one.bytes_done, one.bytes_zero) == (done + heard_of.bytes_done, zero + heard_of.bytes_zero)
        assert one.bytes_total == done + heard_of.bytes_total
    assert {one.state for one in disk_progress(Job().migration.disks, tally, finished=True)} == {"copied"}


@given(heard=st.lists(flushed, max_size=3))
@cases(30)
def test_watermarks_of_a_service_before_count_like_the_flushes_themselves(heard: list[Flushed]) -> None:
    last = {one.key: replace(one, bytes_checked=0) for one in heard}
    again, listened = Tally(before=BEFORE), Tally(before=BEFORE)
    again.take_up({key: mark_of(one) for key, one in last.items()})
    for one in last.values():
        listened.take(one)
    assert again.disks == listened.disks == last


@given(turns=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=5), before=st.integers(0, 1000))
@cases(30)
def test_a_clock_counts_its_turns_and_no_time_between_them(turns: list[tuple[int, int]], before: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        time = SimpleNamespace(now=1.0)
        patched.setattr(hearing, "time", SimpleNamespace(monotonic=lambda: time.now))
        clock, counted = Clock(before), before
        for waits, works in turns:
            time.now += waits
            assert clock.seconds() == counted
            with clock:
                time.now += works
                counted += works
                assert clock.seconds() == counted
        assert clock.seconds() == counted
