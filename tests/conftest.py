"""What many tests share."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import postgres

# A service in the test's own process must not log into what a command prints: structlog's default is standard output.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))

# A shell that starts the tests in the background has Ctrl-C ignored, in all that they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same cases in each run, and no judgement by the clock: a test that fails one time in a thousand fails for everybody or for
# nobody. Whoever looks for new cases sets CASES_TIMES.
settings.register_profile(
    "suite",
    derandomize="CASES_TIMES" not in os.environ,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")

# Each of these takes minutes: begun first, so that no worker is alone with one at the end.
LONG = ("tests/real/test_zfs.py", "tests/real/test_windows.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres.server() as url:
        yield url


_numbers = itertools.count(1)


def _new_postgres_database(server: str) -> str:
    name = f"test{next(_numbers)}"
    with psycopg.connect(server % "postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server % name


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty database, of each sort that the service runs on."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    new: Callable[[str], str] = _new_postgres_database
    return new(request.getfixturevalue("postgres_server"))
