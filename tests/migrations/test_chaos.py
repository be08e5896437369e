"""The chaos of `python -m bench.chaos` in small: three services on one PostgreSQL, and every fault that there is."""

from pathlib import Path

import pytest

from bench.chaos.faults import FAULTS
from bench.chaos.running import run

# More faults than there are kinds of them: each is drawn at least once.
SEED, JOBS, FAULTS_DRAWN = 4, 6, 12


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_job_ends_with_the_right_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    outcome = run(tmp_path, jobs=JOBS, faults=FAULTS_DRAWN, seed=SEED)
    assert outcome.wrong == [], outcome.summary()
    assert outcome.right == JOBS, outcome.summary()
    assert outcome.faults.total() == FAULTS_DRAWN
    assert set(outcome.faults) == set(FAULTS)
