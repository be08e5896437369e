"""What many tests share."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import structlog

from tests import postgres

# A service in the test's own process must not log into what a command prints: structlog's default is standard output.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


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
