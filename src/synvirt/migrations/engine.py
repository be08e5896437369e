"""The durable engine: every job that was taken in is run to its end, through crashes and restarts.

DBOS Transact keeps a row a workflow and runs again, at the next start, what had not ended. It knows nothing of a job but its
id: the state, the watermarks and the ledger are ours, in the store, so a step that runs twice does nothing twice. This is the
only module that imports DBOS: its API changes often, and it is pinned exactly.

DBOS runs the workflows in an event loop of its own thread. Nothing here blocks it: steps go to threads for what blocks.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from uuid import UUID

import structlog
from dbos import DBOS, DBOSConfig, SetWorkflowID
from sqlalchemy import make_url

from synvirt.errors import PersistFailed
from synvirt.migrations.advance import advance
from synvirt.migrations.course import KEPT_EVERY_S, NOTE, Course, noted
from synvirt.migrations.job import Stop
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.tidying import tidied
from synvirt.model import ENDS, State

log = structlog.get_logger(__name__)

# DBOS recovers a workflow only under the version that began it. Ours never changes: a job's progress is in the store, and any
# version of the service goes on from there.
APPLICATION_VERSION = "synvirt-1"
# Jobs that have begun and not ended: most of them hold for their cut-over, or wait for their turn. More wait in the queue.
JOBS_ALIVE = 1_000
# Of the event loop that all jobs share: a thread each for those that wait for a boot or a conversion, and some for the store.
THREADS = 256
# How soon a queued job begins. A submitted job is to copy its first byte within a second.
QUEUE_POLL_S = 0.1
# Between two looks for what operators asked of jobs by way of another host's API.
WISHES_POLL_S = 1.0
# The store is away (a full disk, a database that restarts): the job waits for it, whatever it takes.
STORE_PAUSE_S = 2.0

# Workflow states in which DBOS itself would do no more, though our job has not ended.
_ABANDONED = frozenset({"SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"})


class Engine:
    """One per process. `start` also takes up every job of this host that has not ended, and tidies up after those that have."""

    def __init__(self, rooms: Rooms, *, url: str, host: str) -> None:
        self.rooms = rooms
        self._url = url
        self._host = host
        self._stops: dict[UUID, Stop] = {}
        self._closing = threading.Event()
        self._tidying = ExitStack()
        self._kept: dict[UUID, Course] = {}
        self._threads_of: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        global _engine  # noqa: PLW0603 - DBOS finds workflows by name in the module, so the module knows the engine
        _engine = self
        config: DBOSConfig = {
            "name": "synvirt",
            "system_database_url": _engine_url(self._url),
            "executor_id": self._host,
            "application_version": APPLICATION_VERSION,
            "enable_otlp": False,
            "log_level": "WARNING",
            # Its pool is for a few hundred rows a minute; a fleet's PostgreSQL has other guests.
            "sys_db_pool_size": 5,
        }
        DBOS(config=config)
        DBOS.listen_queues([self._queue])
        DBOS.launch()
        DBOS.register_queue(
            self._queue, worker_concurrency=JOBS_ALIVE, polling_interval_sec=QUEUE_POLL_S, on_conflict="always_update"
        )
        for migration in self.rooms.store.unended(host=self._host):
            self.begin(migration.id)
        threading.Thread(target=self._look_for_wishes, name="wishes", daemon=True).start()
        self._tidying.enter_context(tidied(self.rooms, host=self._host))

    def begin(self, job_id: UUID) -> None:
        """Hand the job to DBOS; again is harmless. Jobs begin in the order they came, and take turns (`slots.Turns`)."""
        status = DBOS.get_workflow_status(str(job_id))
        if status is None:
            with SetWorkflowID(str(job_id)):
                DBOS.enqueue_workflow(self._queue, migrate, str(job_id))
        elif status.status in _ABANDONED:
            DBOS.resume_workflow(str(job_id), queue_name=self._queue)

    def wake(self, job_id: UUID) -> None:
        """The operator asked something of the job: it looks at once."""
        if self.rooms.store.cancel_requested(job_id):
            self._stop_of(job_id).set()

    def close(self) -> None:
        """Let go of the jobs as a crash would: they go on at the next start. Workers end with our process."""
        self._closing.set()
        self._tidying.close()
        DBOS.destroy(workflow_completion_timeout_sec=0)

    @property
    def _queue(self) -> str:
        return f"migrations@{self._host}"

    def _stop_of(self, job_id: UUID) -> Stop:
        return self._stops.setdefault(job_id, Stop())

    def _look_for_wishes(self) -> None:
        kept_at = time.monotonic()
        while not self._closing.wait(WISHES_POLL_S):
            if time.monotonic() - kept_at >= KEPT_EVERY_S:
                kept_at = time.monotonic()
                for job_id in list(self._stops):
                    self._keep_course(job_id)
            for job_id in list(self._stops):
                try:
                    self.wake(job_id)
                except PersistFailed as error:
                    log.warning("cannot see what operators ask", cause=error.detail)

    def _take_up_course(self, job_id: UUID) -> None:
        if job_id not in self.rooms.board.courses():
            self.rooms.board.take_up(job_id, noted(self.rooms.store.noted(job_id, NOTE)))

    def _keep_course(self, job_id: UUID) -> None:
        """No job waits for it, and none fails without it."""
        course = self.rooms.board.courses().get(job_id, Course())
        if course == self._kept.get(job_id, Course()):
            return
        try:
            self.rooms.store.note(job_id, NOTE, course.as_note())
            self._kept[job_id] = course
        except PersistFailed as error:
            log.warning("how fast a job copies cannot be kept", job=str(job_id), cause=error.detail)

    async def advance(self, job_id: UUID, state: State) -> State:
        """One move; waits for a store that is away, since without it a job can neither go on nor fail."""
        stop = self._stop_of(job_id)
        loop = asyncio.get_running_loop()
        if self._threads_of is not loop:
            self._threads_of = loop
            loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="jobs"))
        while True:
            try:
                migration = await asyncio.to_thread(self.rooms.store.get, job_id)
                await asyncio.to_thread(self._take_up_course, job_id)
                if await asyncio.to_thread(self.rooms.store.cancel_requested, job_id):
                    stop.set()
                moved_to = await advance(self.rooms, migration, state, stop)
            except PersistFailed as error:
                log.warning("the store is away; the job waits", job=str(job_id), cause=error.detail)
                await asyncio.sleep(STORE_PAUSE_S)
                continue
            if moved_to in ENDS:
                self._stops.pop(job_id, None)
                await asyncio.to_thread(self._keep_course, job_id)
                self._kept.pop(job_id, None)
                self.rooms.board.unpin(job_id)
            return moved_to


_engine: Engine | None = None


@DBOS.step()
async def move(job_id: str, state: str) -> str:
    if _engine is None:
        raise RuntimeError("the engine is not started")
    return str(await _engine.advance(UUID(job_id), State(state)))


@DBOS.workflow(max_recovery_attempts=None)
async def migrate(job_id: str) -> str:
    """A job from Queued to its end. A job that moved before a crash, in a step DBOS did not see the end of, is found where it
    is: `advance` answers with the store's state when it is asked about another."""
    state = str(State.QUEUED)
    while State(state) not in ENDS:
        state = await move(job_id, state)
    return state


def _engine_url(store_url: str) -> str:
    """Beside the store: a SQLite file of its own, since DBOS locks as it likes; or a schema in the same PostgreSQL."""
    url = make_url(store_url)
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql").render_as_string(hide_password=False)
    return f"sqlite:///{url.database}.engine"
