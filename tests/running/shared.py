"""What one worker of a run makes for all of its workers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def of_all_workers(tmp_path_factory: pytest.TempPathFactory, lock: str) -> Iterator[Path]:
    """The folder around those of this run's workers, which one of them at a time may use. Without workers that folder outlives
    the run, and the code that made what lies there: then it is this process's own."""
    own = tmp_path_factory.getbasetemp()
    with (own.parent / lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
