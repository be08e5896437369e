"""Runs as data, and the threads that do them.

    begin(work) ─▶ queued ─▶ preparing ─▶ … the work's own states … ─▶ completed
                                └──────── any error, or a cancel ────────▶ failed, cancelled

A run that the service's end cuts off is failed at the next start: nothing of it counts.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import structlog

from synvirt.backups.model import ENDS, BackupProgress, BackupRun, Status, Trouble
from synvirt.backups.under_way import UnderWay
from synvirt.errors import BackupConflict, Cancelled, Internal, Interrupted, SynvirtError
from synvirt.model import now
from synvirt.store.backups import BackupRows

# Each reads with a thread a core: more would only take turns.
RUNS_AT_ONCE = 2

_log = structlog.get_logger("synvirt.backups")


class Runs:
    """`lock`: held by who begins a run, from its look at what runs already on."""

    def __init__(self, rows: BackupRows, *, host: str, exports: Path) -> None:
        self._rows, self._host, self._exports = rows, host, exports
        self._pool = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="backup")
        self.lock = threading.Lock()
        self._stops: dict[UUID, threading.Event] = {}
        self._closing = False
        self._figures: dict[UUID, BackupProgress] = {}

    def start(self) -> None:
        """Once, before anything is asked: what the last service left under way has failed."""
        open_ = tuple(str(status) for status in Status if status not in ENDS)
        for text in self._rows.all("run", host=self._host, states=open_):
            run = BackupRun.model_validate_json(text)
            self._end(run, Interrupted("the service ended while the run was under way", hint="start the run again"))

    def close(self) -> None:
        """Runs under way stop; the next start says that they were cut off."""
        with self.lock:
            self._closing = True
            for stop in self._stops.values():
                stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def get(self, run_id: UUID) -> BackupRun:
        """BackupNotFound."""
        return self._with_figures(BackupRun.model_validate_json(self._rows.get("run", run_id, host=self._host)))

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[BackupRun], int | None]:
        texts, following = self._rows.page("run", host=self._host, limit=limit, cursor=cursor)
        return [self._with_figures(BackupRun.model_validate_json(text)) for text in texts], following

    def cancel(self, run_id: UUID) -> BackupRun:
        """BackupConflict, where it has ended."""
        with self.lock:
            run = self.get(run_id)
            if run.status in ENDS:
                raise BackupConflict(f"run {run_id} has ended: it is {run.status}")
            self._stops.get(run_id, threading.Event()).set()
        return run

    def _with_figures(self, run: BackupRun) -> BackupRun:
        figures = self._figures.get(run.id)
        return run if figures is None or run.status in ENDS else run.model_copy(update={"progress": figures})

    def begin(self, run: BackupRun, work: Callable[[UnderWay], None]) -> BackupRun:
        """With the lock held. BackupConflict, where the service is being stopped."""
        if self._closing:
            raise BackupConflict("the service is being stopped")
        self._save(run)
        self._stops[run.id] = threading.Event()
        self._pool.submit(self._do, run, work)
        return run

    def _do(self, run: BackupRun, work: Callable[[UnderWay], None]) -> None:
        under_way = UnderWay(run, self._stops[run.id].is_set, self._save, self._figures)
        try:
            under_way.move(Status.PREPARING, started_at=now())
            work(under_way)
            self._end(under_way.run, None)
        except Exception as error:
            if self._closing:
                return
            known = error if isinstance(error, SynvirtError) else Internal("something unexpected went wrong in the run")
            if known is not error:
                _log.error("a backup run broke", run=str(run.id), exc_info=error)
            with contextlib.suppress(SynvirtError):  # the store is gone: the next start will say it
                self._end(under_way.run, known)
        finally:
            self._stops.pop(run.id, None)
            self._figures.pop(run.id, None)

    def _end(self, run: BackupRun, error: SynvirtError | None) -> None:
        status = Status.COMPLETED if error is None else Status.CANCELLED if isinstance(error, Cancelled) else Status.FAILED
        progress = self._figures.get(run.id, run.progress)
        if error is not None and run.path is not None:
            shutil.rmtree(self._exports / Path(run.path).name, ignore_errors=True)
        trouble = None if error is None else Trouble(code=error.code, message=error.detail, hint=error.hint)
        self._save(run.model_copy(update={"status": status, "finished_at": now(), "progress": progress, "error": trouble}))

    def _save(self, run: BackupRun) -> None:
        self._rows.put("run", run.id, run.model_dump_json(), host=self._host, state=str(run.status))
