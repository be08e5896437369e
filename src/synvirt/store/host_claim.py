"""Only one process for each host id: an advisory lock of a session on PostgreSQL, a locked file next to SQLite's."""

import fcntl
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from synvirt.errors import Conflict, PersistFailed

# The lock is a pair of numbers: this one, "host", and the hash of the host's id.
SPACE = 0x686F7374
# After this long the server ends the session of a host that is gone (by default after two hours), so that the host can start
# again.
KEEPALIVES = ("tcp_keepalives_idle = 10", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 4", "tcp_user_timeout = 30000")


class HostClaim:
    """The claim is held by the first process that asks, until it ends. On PostgreSQL it is lost with its session; then `hold`
    takes it again."""

    def __init__(self, engine: Engine, host: str) -> None:
        self._engine, self._host = engine, host
        self._session: Connection | None = None
        self._file: IO[bytes] | None = None

    def hold(self) -> None:
        """Takes the claim. Idempotent. Conflict, when another process has the host's id; PersistFailed, when the database is
        away."""
        try:
            held = self._hold_session() if self._engine.dialect.name == "postgresql" else self._hold_file()
        except SQLAlchemyError as error:
            self.let_go()
            raise PersistFailed(
                f"the store failed: {str(error).splitlines()[0]}", hint="make sure that the database answers"
            ) from error
        if not held:
            raise Conflict(
                f"another service runs as host {self._host} on this database",
                hint="give each host a host_id of its own (docs/settings.md), or stop the other service",
            )

    def let_go(self) -> None:
        """Releases the lock, so that another process may use the host id."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(SQLAlchemyError):
                session.invalidate()
                session.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _hold_session(self) -> bool:
        if self._session is not None:
            # As long as the session lives, it has its lock.
            with suppress(SQLAlchemyError):
                self._session.execute(text("SELECT 1"))
                return True
            self.let_go()
        session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._session = session
        for setting in KEEPALIVES:
            session.execute(text(f"SET {setting}"))
        number = zlib.crc32(self._host.encode()) - (1 << 31)
        asked = text("SELECT pg_try_advisory_lock(:space, :number)")
        held = bool(session.execute(asked, {"space": SPACE, "number": number}).scalar())
        if not held:
            self.let_go()
        return held

    def _hold_file(self) -> bool:
        if self._file is None:
            file = Path(f"{self._engine.url.database}.lock").open("ab")  # noqa: SIM115 - it is open as long as it is held
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self._file = file
        return True
