"""The connections of a store to SQLite, which rest between transactions."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from synvirt.store import Store
from synvirt.store.opening import RESTING


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{path}")
    yield made
    made.close()


def opened(path: Path) -> int:
    """How many descriptors this process has of the database."""
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_transaction_takes_a_connection_that_rests(store: Store) -> None:
    taken: list[object] = []
    event.listen(store._engine, "checkout", lambda *about: taken.append(about))
    for _ in range(5):
        store.last_event_id()
        store.hosts.begin("local", ttl_s=9, document="{}")
    assert taken == []


def test_a_transaction_that_fails_leaves_nothing_for_the_next(store: Store) -> None:
    def fails(transaction: Callable[[], AbstractContextManager[Connection]], statement: str) -> None:
        with transaction() as db:
            db.exec_driver_sql(statement)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails(store._writing, "DELETE FROM alembic_version")
    with pytest.raises(ZeroDivisionError):
        fails(store._reading, "SELECT 1")
    with store._writing() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM alembic_version").scalar() == 1


def test_a_few_rest_and_all_are_closed_with_the_store(store: Store, path: Path) -> None:
    with ExitStack() as many:
        for _ in range(RESTING + 3):
            many.enter_context(store._reading()).exec_driver_sql("SELECT 1")
    assert len(store._connections._resting) == RESTING
    with store._reading() as db:
        db.exec_driver_sql("SELECT 1")
        store.close()
    assert opened(path) == 0
