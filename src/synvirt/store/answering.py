"""A connection to PostgreSQL that waits for an answer only so long. libpq itself waits for as long as the connection is there:
also for a server that is frozen, or hangs at its disk, whose kernel goes on to acknowledge what it gets.

Imported only where the store is on PostgreSQL, as it loads libpq.
"""

import time
from collections.abc import Generator
from typing import Any

from psycopg import Connection, OperationalError

# A statement takes milliseconds, and at most waits until others have written. Above it nobody waits for the answer any more.
ANSWER_S = 30.0


class Answering(Connection[Any]):
    """Breaks, with OperationalError, where the server does not answer a statement within `answer_s`. None: no limit."""

    answer_s: float | None = ANSWER_S

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
        """The result of the statement whose steps `gen` has."""
        return super().wait(self._in_time(gen), *arguments, **named)

    def _in_time(self, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        began, ready = time.monotonic(), None
        while True:
            try:
                wanted = steps.send(ready)
            except StopIteration as done:
                return done.value
            ready = yield wanted
            if not ready and self.answer_s is not None and time.monotonic() >= began + self.answer_s:
                self.close()
                raise OperationalError(f"the database has not answered for {self.answer_s:.0f} s")
