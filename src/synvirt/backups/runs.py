"""Runs as data, and the kernel's runner that executes them, each in a thread.

    begin(run) ──────────┐
    start(): cut off ────┴─▶ queued ─▶ preparing ─▶ … the kind's own states … ─▶ completed
                                          └──────── any error, or a cancel ────────▶ failed, cancelled

A run's work follows only from its row and its memory (memory.py), whether it is new or its service has ended since: so every
kind can also be continued. After the service's end a run continues at the next start, from its progress; after a lost lease,
once the lease is held again. If it cannot continue, or the service has ended RESUMED_MAX times during it, it fails. What a
failed or cancelled run made is undone, by the ledger. A restore that has started its guest at once does not fail
(`until_it_goes_well`): what the guest wrote is nowhere else. A run waits while its destination or this host's libvirtd is
away (`while_something_is_away`), or the store.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from uuid import UUID

import structlog

from synvirt.backups.limits import URGENT
from synvirt.backups.memory import Memory
from synvirt.backups.model import ENDS, UNENDED, BackupRun, RestoredDomain, Status, Trouble
from synvirt.backups.trouble import trouble_of, until_it_goes_well, while_something_is_away
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import wait
from synvirt.destinations import AWAY_PAUSES_S
from synvirt.errors import BackupConflict, BackupNotFound, Cancelled, Interrupted, PersistFailed, SynvirtError
from synvirt.jobs.board import Figures
from synvirt.jobs.instant import GuestWrites, is_started, refuse_loss
from synvirt.jobs.ledger import SWEEP_AWAY_S, Ledger
from synvirt.jobs.runner import STORE_PAUSE_S, Runner, in_a_thread
from synvirt.jobs.slots import Turns
from synvirt.jobs.stop import Stop
from synvirt.model.values import now
from synvirt.repeating import pause_after
from synvirt.sizes import sized
from synvirt.store import Event
from synvirt.store.backups import BackupRows, Key, Row
from synvirt.store.documents import Unreadable, parsed, readable
from synvirt.store.ledger import Owner
from synvirt.store.store import StoreAway

# Each reads with one thread for each core: more runs would only take turns.
RUNS_AT_ONCE = 2
# How often one run is continued after the service's end.
RESUMED_MAX = 5
# Seconds between two checks whether a thread has ended.
LOOK_EVERY_S = 0.05
# Runs that are read at once when old ones are removed.
PAGE = 500

_log = structlog.get_logger("synvirt.backups")

Work = Callable[[UnderWay], None]
# By run: what was not undone, for a person to decide.
Kept = dict[UUID, list[Trouble]]


def _nothing(_: BackupRun) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RunKind:
    """A kind of run, for the runner. `work`: does the work from the run's present progress; `started_at` of its row says
    whether a service has begun it before. `come_to`: for a run that the service's end interrupted: its result, if all of it is
    done. If either raises a SynvirtError, the run has failed."""

    work: Callable[[BackupRun], Work]
    come_to: Callable[[BackupRun], RestoredDomain | None] = _nothing


class Runs:
    """`lock`: held while a run is begun, from the check of the present runs on. `at_once`: backups and verifications, and as
    many restores and boot tests. `kinds`: by their names. `ledger`: of what runs make; `kept`: what its undoing leaves."""

    def __init__(
        self,
        rows: BackupRows,
        kinds: Mapping[str, RunKind],
        *,
        host: str,
        at_once: int = RUNS_AT_ONCE,
        lease_lost: Callable[[], SynvirtError],
        memory: Memory,
        ledger: Ledger,
        kept: Kept,
    ) -> None:
        self._rows, self._kinds, self._host, self._lease_lost = rows, kinds, host, lease_lost
        self._memory, self._ledger, self._kept = memory, ledger, kept
        # A restore or a boot test does not wait for the backups of a night.
        self._turns, self._urgent = Turns(at_once), Turns(at_once)
        self.lock = threading.RLock()
        # The runs that this service has begun and that have not ended; and those of them with a thread.
        self._begun: dict[UUID, BackupRun] = {}
        self._stops: dict[UUID, Stop] = {}
        self._at_work: set[UUID] = set()
        self._started = self._closing = self._paused = False
        # Runs that a lost lease interrupted, until it is held again; and those that may be stored, though the store failed.
        self._cut, self._in_doubt = set[UUID](), set[UUID]()
        self._runner = Runner(self._run, self._to_run, name="backups")
        self.figures = Figures[Status]()

    def start(self, *, counted: bool = True) -> list[BackupRun]:
        """Called before any request: each run of the last service ends, continues, or fails. `counted`: the run itself may have
        ended the service. Returns the interrupted runs."""
        left = self.not_ended()
        self._ledger.sweep_all(but=frozenset(run.id for run in left))
        for run_id in list(self._kept):
            with contextlib.suppress(BackupNotFound):  # its record was removed
                self._save(self._warned(self.get(run_id)))
            del self._kept[run_id]
        # Those that were begun are under way: after a lost lease this is called again, if it failed.
        cut_off = [run for run in left if run.id not in self._begun]
        # All are judged before any begins: undoing one may be in the way of another.
        for run in [run for run in cut_off if self._goes_on(run)]:
            with self.lock:
                self.begin(run.model_copy(update={"status": Status.QUEUED, "resumed_count": run.resumed_count + counted}))
        self._rows.sweep_events(host=self._host)
        return cut_off

    def _goes_on(self, run: BackupRun) -> bool:
        """Whether the run continues; else it ends here. A run that itself ends the service must not repeat that forever."""
        _log.warning("a backup run was cut off", run=str(run.id), kind=run.kind, stored_bytes=run.stored_bytes)
        is_cancelled = self._memory.is_cancelled(run.id)
        failed = Cancelled() if is_cancelled else _interrupted(run)
        if is_started(run.instant):
            if self._memory.is_kept(run.id) and not is_cancelled:
                return True
            self._end(run, failed)  # else it was being undone
            return False
        try:
            domain = self._kinds[run.kind].come_to(run)
        except SynvirtError as error:
            self._end(run, error)
            return False
        if domain is not None:
            self._end(run.model_copy(update={"domain": domain}), None)
        elif is_cancelled or run.resumed_count >= RESUMED_MAX:
            self._end(run, failed)
        else:
            return True
        return False

    def close(self) -> None:
        """Stops the runs, and waits for their threads as long as the runner does, as one may hang at a server. The next start
        notes that they were interrupted."""
        with self.lock:
            self._closing = True
            for stop in self._stops.values():
                stop.set()
        self._runner.close()

    def pause(self) -> None:
        """This host has lost its lease: its runs stop as by the service's end, and none begins until `resumed`."""
        with self.lock:
            self._paused = True
            self._cut |= self._stops.keys()
            for stop in self._stops.values():
                stop.set()
        if self._started:
            self._runner.pause()

    def let_go(self, within_s: float) -> bool:
        """Whether all paused runs have ended. Blocks for `within_s` seconds at most."""
        until = time.monotonic() + within_s
        while still := bool(self._cut & self._runner.running()):
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_EVERY_S)
        return not still

    def resumed(self) -> None:
        """Call it with the lock held, once all paused runs have ended. The interrupted ones `start` again."""
        self._paused = False
        for run_id in self._cut:  # one that was just begun, and has never run, is taken up like the others
            self._forget(run_id)
        self._cut.clear()
        if self._started:
            self._runner.resume()

    def get(self, run_id: UUID) -> BackupRun:
        """BackupNotFound."""
        return self._with_figures(parsed(BackupRun, self._rows.get("run", run_id, host=self._host)))

    def as_stored(self, run_ids: Collection[UUID]) -> dict[UUID, BackupRun | Unreadable]:
        """Those of these runs that there are, by id, as they were stored last; or why one cannot be read."""
        found: dict[UUID, BackupRun | Unreadable] = {}
        for run_id, (text, version) in self._rows.several("run", run_ids, host=self._host).items():
            try:
                found[run_id] = parsed(BackupRun, text, version)
            except Unreadable as error:
                found[run_id] = error
        return found

    def not_ended(self) -> list[BackupRun]:
        """Runs that have not ended, oldest first."""
        return readable(BackupRun, self._rows.all("run", host=self._host, states=_OPEN))

    def page(
        self, *, limit: int, cursor: int | None, only: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[list[BackupRun], int | None]:
        """A page of at most `limit` runs, newest first, and the cursor of the next page; None: it was the last. `only`: as in
        the store's page."""
        texts, following = self._rows.page("run", host=self._host, limit=limit, cursor=cursor, only=only)
        return [self._with_figures(run) for run in readable(BackupRun, texts)], following

    def cancel(self, run_id: UUID, *, guest_writes: GuestWrites = "keep") -> BackupRun:
        """Cancels the run. A waiting one ends at once. BackupConflict, if it has ended, or would lose what a guest wrote since
        its instant start and the request does not allow that."""
        with self.lock:
            self._to_run()
            run = self.get(run_id)
            if run.status in ENDS:
                raise BackupConflict(f"run {run_id} has ended: it is {run.status}")
            refuse_loss(f"run {run_id}", run.instant, guest_writes, BackupConflict)
            self._memory.cancel(run_id)
            self._stops.get(run_id, Stop()).set()
            if run_id in self._begun and run_id not in self._at_work:
                del self._begun[run_id]
                self._end(run, Cancelled())
            run = self.get(run_id)
            if run.status in ENDS:  # it may have ended just before that was noted
                self._rows.put_all([], host=self._host, gone=self._memory.keys(run_id))
            return run

    def ended_before(self, moment: datetime) -> Iterator[BackupRun]:
        """The runs of this host that ended before that, oldest first, a page at a time: there may be tens of thousands."""
        number = 0
        while rows := self._rows.runs_from(number, host=self._host, states=_ENDED, limit=PAGE):
            number = rows[-1][0]
            found = readable(BackupRun, (document for _, document in rows))
            yield from (run for run in found if run.finished_at is not None and run.finished_at < moment)
            if found and found[-1].created_at >= moment:  # the later ones began after it
                return

    def remove(self, run_id: UUID) -> None:
        """Removes the record of an ended run."""
        self._rows.remove_run(run_id, host=self._host)

    def _with_figures(self, run: BackupRun) -> BackupRun:
        progress = self.figures.progress(run.id)
        return run if progress is None or run.status in ENDS else run.model_copy(update={"progress": progress})

    # ── what the stream and the metrics follow ───────────────────────────────────────────────────────────────────────

    def last_event_id(self) -> int:
        return self._rows.last_event_id(host=self._host)

    def newest_events(self, *, job_id: UUID | None = None) -> list[Event]:
        """The newest event of each run that has not ended, or of the run with that id."""
        return self._rows.newest_events(host=self._host, ends=_ENDED, run_id=job_id)

    def events_after(self, event_id: int, *, job_id: UUID | None = None, limit: int | None = None) -> list[Event]:
        return self._rows.events_after(event_id, host=self._host, run_id=job_id, limit=limit)

    # ── executing runs ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, run: BackupRun, *, with_: tuple[Row, ...] = ()) -> BackupRun:
        """Call it with the lock held. `with_`: rows written together with the run. BackupConflict, if the service stops. What
        `lease_lost` gives, if it has lost its lease."""
        if self._closing:
            raise BackupConflict("the service is being stopped")
        if self._paused:
            raise self._lease_lost()
        if not self._started:
            self._runner.start()
            self._started = True
        run = run.model_copy(update={"host": self._host})
        self._in_doubt.add(run.id)
        self._save(run, with_=with_)
        self._in_doubt.discard(run.id)
        self._stops[run.id], self._begun[run.id] = Stop(), run
        self._runner.begin(run.id)
        return run

    def _to_run(self) -> list[UUID]:
        """The runs that were begun and have not ended; also one that is stored, though the answer to its commit was lost."""
        with self.lock:
            for run_id in self._in_doubt - self._begun.keys():
                with contextlib.suppress(BackupNotFound):
                    if (run := self.get(run_id)).status not in ENDS:
                        self._stops[run_id], self._begun[run_id] = Stop(), run
            self._in_doubt.clear()
            return list(self._begun)

    async def _run(self, run_id: UUID) -> None:
        """Runs it to its end, or until it is interrupted. One for which there is no thread now is looked for again."""
        with self.lock:
            if run_id not in self._begun:  # it has ended
                return
            run, stop = self._begun[run_id], self._stops[run_id]
        turns, begun, waits = self._urgent if run.kind in URGENT else self._turns, False, False

        def do() -> None:
            nonlocal begun
            begun = True
            self._do(run, stop)

        try:
            # Cancelled while it waits: `cancel` has ended it, or it is interrupted.
            with contextlib.suppress(Cancelled):
                if not is_started(run.instant):  # else a guest waits for it
                    await turns.taken(run_id, stop.or_stop)
                await in_a_thread(do)
        except RuntimeError as error:
            waits = not begun
            if begun:
                raise
            _log.warning("a run waits for a thread", run=str(run_id), cause=str(error))
        finally:
            turns.left(run_id)
            if not waits:
                self._forget(run_id)

    def _do(self, run: BackupRun, stop: Stop) -> None:
        with self.lock:
            if run.id not in self._begun or self._is_cut(run.id):
                return
            self._at_work.add(run.id)
        with structlog.contextvars.bound_contextvars(run=str(run.id), kind=run.kind):
            under_way, tries = self._under_way(run, stop), count()
            try:
                while not self._did(under_way):
                    wait(pause_after(next(tries), AWAY_PAUSES_S), stop.is_set)
                    under_way = self._under_way(self._as_stored(run.id, stop), stop)
            except Exception as error:
                self._stored_end(under_way, error)
            finally:
                self._at_work.discard(run.id)

    def _under_way(self, run: BackupRun, stop: Stop) -> UnderWay:
        return UnderWay(run, stop.is_set, self._save, self.figures, lambda: self._is_cut(run.id))

    def _did(self, under_way: UnderWay) -> bool:
        """Does the run's work to its end. False: the store failed meanwhile, and the run goes on as it is stored, as after a
        restart."""
        try:
            until_it_goes_well(under_way, lambda: while_something_is_away(under_way, lambda: self._to_its_end(under_way)))
        except StoreAway as away:
            _log.warning("the store is away; the run waits", cause=away.detail)
            return False
        return True

    def _as_stored(self, run_id: UUID, stop: Stop) -> BackupRun:
        """The run, once the store answers. Cancelled, if it is stopped before."""
        while True:
            with contextlib.suppress(StoreAway):
                return parsed(BackupRun, self._rows.get("run", run_id, host=self._host))
            wait(STORE_PAUSE_S, stop.is_set)

    def _to_its_end(self, under_way: UnderWay) -> None:
        run = under_way.run
        work = self._kinds[run.kind].work(run)
        under_way.move(Status.PREPARING, started_at=run.started_at or now())
        work(under_way)
        self._stored_end(under_way, None)

    def _stored_end(self, under_way: UnderWay, error: Exception | None) -> None:
        """Ends the run. While the store is away it waits: a run without an end would keep its job from running again until the
        service starts anew, and one that has done its work would be undone."""
        run_id = under_way.run.id
        while True:
            try:
                if error is not None and self._is_cut(run_id):
                    self._save(under_way.now(), announced=False)
                else:
                    self._end(under_way.now(), error, away_s=SWEEP_AWAY_S)
            except PersistFailed as away:
                _log.warning("the store is away; the run's end waits", cause=away.detail)
            except SynvirtError as wrong:
                _log.error("a run's end cannot be stored", cause=wrong.detail)
                return
            else:
                return
            if self._is_cut(run_id):  # the next start goes on with it
                return
            time.sleep(STORE_PAUSE_S)

    def _is_cut(self, run_id: UUID) -> bool:
        return self._closing or run_id in self._cut

    def _forget(self, run_id: UUID) -> None:
        with self.lock:  # not before the beginner of the run has noted it
            self._stops.pop(run_id, None)
            self._begun.pop(run_id, None)
        self.figures.unpin(run_id)

    def _end(self, run: BackupRun, error: Exception | None, *, away_s: float = 0.0) -> None:
        if error is not None:
            # This comes first: the memory would be wrong as soon as anything is removed, and a half undone run must not
            # continue.
            self._memory.forget(run.id)
            self._ledger.sweep(run.id, away_s=away_s)
            run = self._warned(run)
        status = Status.COMPLETED if error is None else Status.CANCELLED if isinstance(error, Cancelled) else Status.FAILED
        ended = {"status": status, "finished_at": now(), "error": None if error is None else trouble_of(error)}
        progress = run.progress.stopped()
        run = run.model_copy(update={**ended, "progress": progress})
        failure = {} if run.error is None else {"code": run.error.code, "detail": run.error.message}
        _log.info(
            "backup run ended",
            run=str(run.id),
            kind=run.kind,
            status=str(status),
            read_bytes=progress.bytes_done,
            stored_bytes=run.stored_bytes,
            **failure,
        )
        # Its request, its progress and its ledger are removed together with its end. Otherwise, after a kill in between, a run
        # would continue that cannot, or overwrite what belongs to its user by then. So is a slot that it could not give back.
        gone = self._memory.keys(run.id)
        settled = (Owner("run", run.id),) if error is None and run.kind == "restore" else ()
        self._save(run, gone=gone, settled=settled, slots_of=(run.id,))
        self._kept.pop(run.id, None)

    def _warned(self, run: BackupRun) -> BackupRun:
        """The run with a warning for each thing of it that was not undone."""
        new = [one for one in self._kept.get(run.id, ()) if one not in run.warnings]
        return run.model_copy(update={"warnings": (*run.warnings, *new)})

    def _save(
        self,
        run: BackupRun,
        *,
        announced: bool = True,
        with_: tuple[Row, ...] = (),
        gone: tuple[Key, ...] = (),
        settled: tuple[Owner, ...] = (),
        slots_of: tuple[UUID, ...] = (),
    ) -> None:
        row = Row("run", run.id, run, state=str(run.status), announced=announced)
        self._rows.put_all([row, *with_], host=self._host, gone=gone, settled=settled, slots_of=slots_of)
        if announced:
            self.figures.committed()


_OPEN = tuple(map(str, UNENDED))
_ENDED = tuple(str(status) for status in ENDS)


def _interrupted(run: BackupRun) -> Interrupted:
    if run.kind != "backup" or run.stored_bytes == 0:
        return Interrupted("the service ended while the run was under way", hint="start the run again")
    progress = run.progress
    return Interrupted(
        f"the service ended while the run was under way: {sized(progress.bytes_done)} of {sized(progress.bytes_total)} were "
        f"read, and {sized(run.stored_bytes)} are stored",
        hint="start the run again: what is stored is not stored twice",
    )
