"""Opens the database of a URL: SQLite in the service's own file, or PostgreSQL; with the limits of each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Dialect, Engine, PoolProxiedConnection, create_engine, event, make_url
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from synvirt.errors import BadRequest

# How long a writer waits for another before it fails. A commit takes milliseconds; this long means a stuck disk.
BUSY_TIMEOUT_S = 20
# A lost network to the database is noticed within half a minute: before the lease of this host is over.
POSTGRESQL_LIMITS = {
    "connect_timeout": 10,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # A host that freezes during a transaction has its row locked. After this time the server ends it, so that it can be fenced.
    "options": "-c idle_in_transaction_session_timeout=20s",
}

# In the info of a connection to SQLite: its next transaction writes.
WRITES = "writes"
# So many connections to SQLite rest between transactions; the others go back to the pool.
RESTING = 5


class SqliteDialect(SQLiteDialect_pysqlite):
    """SQLite, whose transactions begin as `writes` in their connection's info says.

    The driver is asked directly. With a listener of its event "begin", SQLAlchemy looks for listeners at each step of each
    statement: that took a seventh of the processor time of a small job."""

    supports_statement_cache = True

    def do_begin(self, dbapi_connection: PoolProxiedConnection) -> None:
        """Begins a transaction: one that writes takes the lock at once."""
        # A deferred transaction that reads first and writes later would fail at once when another wrote in between.
        writes = dbapi_connection.info.pop(WRITES, False)
        dbapi_connection.cursor().execute("BEGIN IMMEDIATE" if writes else "BEGIN").close()


registry.register("sqlite.synvirt", __name__, SqliteDialect.__name__)


class Connections:
    """The connections of an engine, each for one transaction at a time.

    Those to SQLite rest between transactions. To take one out of SQLAlchemy's pool, wrap it and put it back takes longer than
    SQLite takes for most transactions. Those to PostgreSQL go back to the pool, which looks whether they are still good."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rest = engine, engine.dialect.name == "sqlite"
        # Threads take from its end and put there; each of that is one step.
        self._resting: list[Connection] = []

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection whose transaction begins with the first statement, and is rolled back."""
        if not self._rest:
            with self._engine.connect() as connection:
                yield connection
            return
        try:
            connection = self._resting.pop()
        except IndexError:
            connection = self._engine.connect()
        try:
            yield connection
            connection.rollback()
        except BaseException:
            connection.close()
            raise
        self._resting.append(connection)
        self._close_down_to(RESTING if self._rest else 0)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A connection in a transaction that writes; it is committed at the end."""
        with self.reading() as connection:
            connection.info[WRITES] = True
            with connection.begin():
                yield connection

    @contextmanager
    def unhurried(self) -> Iterator[Connection]:
        """As `writing`, and on PostgreSQL a statement may take any time: a host makes new tables of all rows; others wait."""
        with self.writing() as connection:
            if self._rest:
                yield connection
                return
            driver: Any = connection.connection.driver_connection
            driver.answer_s = None
            try:
                yield connection
            finally:
                del driver.answer_s  # the limit of all counts again

    def close(self) -> None:
        """What is in a transaction is closed at its end."""
        self._rest = False
        self._close_down_to(0)
        self._engine.dispose()

    def _close_down_to(self, resting: int) -> None:
        while len(self._resting) > resting:
            with suppress(IndexError):  # another thread was faster
                connection = self._resting.pop()
                if not self._rest:  # a pool that was disposed of would keep it open
                    connection.detach()
                connection.close()


def opened(url: str) -> Engine:
    """The engine of a URL. Its first connection fails if the database cannot be used: SQLAlchemyError, BadRequest."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        postgresql = create_engine(
            parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True, connect_args=POSTGRESQL_LIMITS
        )
        event.listen(postgresql, "do_connect", _answering_in_utf8)
        return postgresql
    _for_its_user_alone(parsed.database)
    engine = create_engine(parsed.set(drivername="sqlite+synvirt"), connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, as the driver begins them too late
        cursor = connection.cursor()
        # FULL: else a power cut could undo a ledger entry, and leave a volume without one.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def _for_its_user_alone(database: str | None) -> None:
    """Makes the file readable only by its user, whatever the mode of its folder is. SQLite gives its other files this mode."""
    if database in (None, "", ":memory:"):
        return
    # An existing file is not opened: closing it again would free the locks that this process has on it.
    # SQLite itself reports a file that cannot be made, or that belongs to another user.
    with suppress(OSError):
        os.close(os.open(str(database), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        with suppress(OSError):
            Path(f"{database}{suffix}").chmod(0o600)


def _answering_in_utf8(_dialect: Dialect, _record: Any, arguments: Any, options: Any) -> Any:
    """A connection, if its database can store our texts: one in SQL_ASCII gives bytes for texts. BadRequest."""
    from synvirt.store.answering import Answering  # loads libpq, which a store on SQLite does not need

    connection = Answering.connect(*arguments, **options)
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        connection.close()
        raise BadRequest(
            f"setting store_url: the database's encoding is {encoding}, and names and messages need UTF8",
            hint="make it again: createdb --encoding=UTF8 --locale=C.UTF-8 --template=template0 NAME",
        )
    return connection
