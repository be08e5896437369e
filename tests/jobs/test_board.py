"""What the board shows of a job whose figures have stopped."""

import pytest

from synvirt.jobs.board import Board
from synvirt.jobs.rate import RATE_WINDOW_S
from synvirt.model.job import Progress
from synvirt.model.kinds import State
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
