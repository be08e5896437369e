"""Attempts that are repeated while a server is away or overloaded."""

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from synvirt.errors import SourceUnreachable
from synvirt.http_answers import LEAST_BYTES
from synvirt.remote import Interrupted

# The pauses between attempts in a row that brought less than LEAST_BYTES each. A server may be away for half a minute. After
# that a job's pass waits longer, and goes on from its watermark.
PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
# A read gives up on a server that asks it to wait longer than this.
RETRY_AFTER_MAX_S: Final = 120.0

T = TypeVar("T")


def retried(
    attempt: Callable[[], T], where: str, *, pause: Callable[[float], object] = time.sleep, moved: Callable[[], int] = lambda: 0
) -> T:
    """The result of the first attempt that is not Interrupted. SourceUnreachable after too many in a row that moved next to
    nothing.

    `where`: what is read, for the error. `moved`: how many bytes all attempts have brought so far."""
    failures, before = 0, moved()
    while True:
        try:
            return attempt()
        except Interrupted as error:
            failures = 1 if moved() - before >= LEAST_BYTES else failures + 1
            before = moved()
            if failures > len(PAUSES_S) or (error.after_s or 0) > RETRY_AFTER_MAX_S:
                raise SourceUnreachable(
                    f"{where}: {error.cause}" + (f", {failures} times in a row" if failures > 1 else ""),
                    hint="is the server overloaded, or the network in between unreliable? The job goes on from where it was.",
                ) from error
            # Random, so that many readers that lost their connection together do not return together.
            pause(max(PAUSES_S[failures - 1] * random.uniform(0.5, 1), error.after_s or 0))  # noqa: S311 - no secret
