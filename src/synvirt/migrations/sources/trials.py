"""The snapshots of deep tests: noted before they are made; the note is deleted when they are gone. What remains after a crash,
or after a source went away during a test, is removed later: at the service's start, then now and then.

    noted ─▶ snapshot ─▶ read ─▶ cleanup ─▶ struck out
      └─ still there, and no test of this service is at it: cleanup ─▶ struck out
                                                             └─ not now: after a minute, after two … an hour at most
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from uuid import UUID, uuid4

import structlog

from synvirt.errors import NotFound, PersistFailed, SynvirtError
from synvirt.live import LiveAdapter
from synvirt.repeating import Pauses, repeated
from synvirt.store.sources import SourceRows, Trial

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
# As long as a test's own cleanup may take, with a connection before it.
TRY_TIMEOUT_S = 900.0
# A service that ends does not wait for a source that hangs: the thread ends with its process.
END_TIMEOUT_S = 5.0


class Trials:
    """The trials of this host. `open_adapter`: the adapter of a source, not connected yet; NotFound, if there is none.
    Blocks."""

    def __init__(self, rows: SourceRows, *, host: str, open_adapter: Callable[[UUID], LiveAdapter]) -> None:
        self._rows, self._host, self._open = rows, host, open_adapter
        # Running tests of this service. A store's host has one service, so any other noted test was interrupted.
        self._under_way: set[str] = set()
        self._pauses = Pauses[str](FIRST_PAUSE_S, LONGEST_PAUSE_S)

    @asynccontextmanager
    async def noted(self, source_id: UUID, vm_id: str) -> AsyncIterator[Trial]:
        """Notes a snapshot that may be made. If the block ends without an error, the snapshot is gone."""
        trial = Trial(source_id, vm_id, f"synvirt-test-{uuid4()}-1")
        self._under_way.add(trial.name)
        try:
            await asyncio.to_thread(self._rows.note_trial, trial, host=self._host)
            yield trial
            await asyncio.to_thread(self._rows.strike_trial, trial)
        finally:
            self._under_way.discard(trial.name)

    def look(self) -> None:
        """Removes all interrupted trials whose time has come. Blocks; never raises."""
        try:
            for trial in self._rows.trials(host=self._host):
                if trial.name not in self._under_way and self._pauses.is_over(trial.name):
                    asyncio.run(self._removed(trial))
        except PersistFailed as error:
            log.warning("cannot see what tests of sources left behind", cause=error.detail)

    async def _removed(self, trial: Trial) -> None:
        fields = {"source": str(trial.source_id), "vm": trial.vm_id, "snapshot": trial.name}
        try:
            async with asyncio.timeout(TRY_TIMEOUT_S):
                await self._remove(trial)
        except PersistFailed:
            raise
        except NotFound as error:  # no such source, or no such VM there
            log.warning("a test's snapshot cannot be removed any more", **fields, cause=error.detail)
        except Exception as error:  # whatever it was, the others are tried too
            self._pauses.begin(trial.name)
            log.warning("a test's snapshot cannot be removed now", **fields, cause=_cause(error))
            return
        else:
            log.info("removed the snapshot that a test left behind", **fields)
        await asyncio.to_thread(self._rows.strike_trial, trial)
        self._pauses.forget(trial.name)

    async def _remove(self, trial: Trial) -> None:
        adapter = await asyncio.to_thread(self._open, trial.source_id)
        try:
            await adapter.connect()
            await adapter.cleanup(trial.vm_id, trial.name)
        finally:
            await adapter.close()


def _cause(error: Exception) -> str:
    return error.detail if isinstance(error, SynvirtError) else type(error).__name__


@contextmanager
def swept(trials: Trials) -> Iterator[None]:
    """While the block runs, removes what interrupted tests have left."""
    with repeated(trials.look, name="trials", every_s=LOOK_EVERY_S, ends_within_s=END_TIMEOUT_S):
        yield
