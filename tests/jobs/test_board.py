"""What the board shows of a job whose figures have stopped."""

import asyncio
from pathlib import Path

import pytest

from synvirt.errors import PersistFailed
from synvirt.jobs.board import Board
from synvirt.jobs.rate import RATE_WINDOW_S, Rate
from synvirt.migrations.engine import Engine
from synvirt.model.job import Progress
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from tests.fakes.workers import in_process
from tests.house import House, offline_plan
from tests.jobs.migrations import migration

MOVES = Progress(bytes_total=100, bytes_done=40, bytes_zero=10, rate_bps=20.0, eta_s=3.0)


@pytest.mark.parametrize(
    ("silent_s", "rate", "eta_s"), [(0.0, 20.0, 3.0), (RATE_WINDOW_S, 20.0, 3.0), (RATE_WINDOW_S + 0.1, 0.0, None)]
)
def test_the_rate_of_a_job_that_reports_nothing_any_more_is_0(silent_s: float, rate: float, eta_s: float | None) -> None:
    """A job that waits, for example as the store is full, was shown with its last rate for as long as it waited."""
    seconds = [5.0]
    board, job = Board(clock=lambda: seconds[0]), migration(state=State.COPYING_FULL)
    board.pin(job.id, job.state, MOVES)
    seconds[0] += silent_s
    expected = MOVES.model_copy(update={"rate_bps": rate, "eta_s": eta_s})
    assert board.progress(job.id) == board.current(job).progress == expected
    assert board.latest() == {job.id: (job.state, expected)}
    board.pin(job.id, job.state, MOVES)
    assert board.current(job).progress == MOVES


def test_a_job_that_waits_for_the_store_says_so_until_it_moves_again() -> None:
    """The store cannot keep why it waits, so the board shows it."""
    board, job = Board(), migration(state=State.COPYING_FULL)
    full = PersistFailed("the store failed: database or disk is full", hint="free some space")
    board.store_is_away(job.id, full)
    assert board.current(job) == job, "nothing of it was known"
    board.pin(job.id, job.state, MOVES)
    board.store_is_away(job.id, full)
    shown = board.current(job)
    assert shown.progress == MOVES.model_copy(update={"rate_bps": 0.0, "eta_s": None})
    assert shown.last_error is not None
    assert (shown.last_error.code, shown.last_error.fatal, shown.last_error.hint) == (
        "E_MIG_PERSIST_FAILED",
        False,
        "free some space",
    )
    assert shown.last_error.message.startswith("the store failed: database or disk is full. The job waits")
    board.store_is_away(job.id, full)
    assert board.current(job).last_error == shown.last_error, "since the first time"
    board.pin(job.id, job.state, MOVES)
    assert (board.current(job).progress, board.current(job).last_error) == (MOVES, None)


def test_the_engine_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path, workers=in_process)
    job = house.intake.submit(offline_plan(tmp_path / "disk.raw"))
    house.board.pin(job.id, job.state, MOVES)

    def full(_job_id: object) -> None:
        raise PersistFailed("the store failed: database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(house.store, "get_to_run", full)
        with pytest.raises(PersistFailed):
            asyncio.run(Engine(house.rooms, host="local").run(job.id))
    last_error = house.board.current(house.store.get(job.id)).last_error
    assert last_error is not None
    assert "The job waits" in last_error.message
    house.close()


def test_a_process_that_stood_still_does_not_show_what_came_meanwhile_as_its_rate() -> None:
    """What its worker had sent is read at once, when it goes on: 4 MiB in a millisecond are no 4 GiB a second."""
    clock = [0.0]
    rate = Rate(clock=lambda: clock[0])
    for second in range(20):
        clock[0] = second
        rate.at(second * MIB)
    clock[0] = 120.0
    shown = []
    for number in range(10):
        clock[0] += 0.001
        shown.append(rate.at((20 + number) * MIB))
    assert max(shown) <= MIB
    for second in range(12):
        clock[0] = 121.0 + second
        last = rate.at((30 + second) * MIB)
    assert last == pytest.approx(MIB, rel=0.2)
