"""The connections of a store: those to SQLite rest between transactions, and those to PostgreSQL do not wait forever."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text

from synvirt.store import Store
from synvirt.store.opening import RESTING
from synvirt.store.store import UPGRADE_LOCK, StoreAway
from tests.running.processes import stopped, until


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


_PID = text("SELECT pg_backend_pid()")


@contextmanager
def hanging(pid: int) -> Iterator[None]:
    """The server's process of a connection. The kernel acknowledges all the same what is sent to it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_that_hangs_is_not_waited_for_forever(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(postgresql_url)
    monkeypatch.setattr("synvirt.store.answering.Answering.answer_s", 0.5)

    def hangs_in_a_transaction() -> None:
        with store._reading() as db, hanging(db.execute(_PID).scalar_one()):
            db.execute(_PID)

    with pytest.raises(StoreAway, match="has not answered"):
        hangs_in_a_transaction()
    with store._reading() as db:
        rests = db.execute(_PID).scalar_one()
    with hanging(rests):
        assert store.last_event_id() == 0, "another connection is made"
    store.close()


def test_a_service_waits_while_another_makes_the_tables(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Store(postgresql_url)
    monkeypatch.setattr("synvirt.store.answering.Answering.answer_s", 0.3)
    opened_: list[Store] = []
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    thread = threading.Thread(target=lambda: opened_.append(Store(postgresql_url)))
    with first._reading() as upgrading:
        upgrading.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": UPGRADE_LOCK})
        thread.start()
        until(lambda: upgrading.execute(waiting).scalar_one() == 1)
        time.sleep(1)
    thread.join()
    (second,) = opened_
    for store in (first, second):
        store.close()
