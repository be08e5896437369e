"""Runs the rehearsals of this host's jobs to their ends, through crashes and restarts, by the kernel's runner. Each has a
thread while it does something."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from uuid import UUID

import structlog

from synvirt.errors import Cancelled, NotFound, PersistFailed, SynvirtError
from synvirt.jobs.runner import Runner, in_a_thread
from synvirt.jobs.shortage import unforeseen
from synvirt.migrations.rooms import Rooms
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import RehearsalState
from synvirt.rehearsals.network import Bubble
from synvirt.rehearsals.steps import STEPS, failed, refuse_lost, sweep_here
from synvirt.rehearsals.together import Networks
from synvirt.rehearsals.under_way import LetGo, NotYet, UnderWay
from synvirt.store.documents import Unreadable

log = structlog.get_logger(__name__)

# How often a rehearsal that waits looks at its job, which clones between two passes, and at the others of its group.
WAIT_POLL_S = 0.5


class Rehearsals:
    """`ca_file`: certificate authorities that are trusted for https pages besides this host's own. `screens`: the folder for
    pictures of the guests' screens. `begin_network`: see UnderWay."""

    def __init__(
        self,
        rooms: Rooms,
        ca_file: Path | None,
        screens: Path,
        *,
        begin_network: Callable[[Sequence[Nic]], Bubble] | None = Bubble,
    ) -> None:
        self._rooms, self._ca_file, self.screens, self._begin_network = rooms, ca_file, screens, begin_network
        self._networks = None if begin_network is None else Networks(begin_network)
        # Whether to look for what this host left when its jobs were taken over; and the rehearsals that were found so.
        self._look_for_left, self._left = True, set[UUID]()
        self._runner = Runner(self._run, self._to_run, name="rehearsals")

    def start(self) -> None:
        """Runs this host's rehearsals from here on."""
        self._forget_screens()
        self._runner.start()

    def begin(self, rehearsal_id: UUID) -> None:
        self._runner.begin(rehearsal_id)

    def pause(self) -> None:
        """This host has lost its lease: when this returns, none of its rehearsals runs."""
        self._runner.pause()

    def resume(self) -> None:
        self._look_for_left = True
        self._runner.resume()

    def _to_run(self) -> list[UUID]:
        rows, host = self._rooms.store.rehearsals, self._rooms.host
        if self._look_for_left:
            self._left = set(rows.left_ids(host=host))
            self._look_for_left = False
        return [*rows.unended_ids(host=host), *self._left]

    def close(self) -> None:
        self._runner.close()

    def screenshot(self, rehearsal_id: UUID) -> bytes | None:
        """The last picture of the guest's screen, a PNG."""
        try:
            return (self.screens / f"{rehearsal_id}.png").read_bytes()
        except OSError:
            return None

    async def _run(self, rehearsal_id: UUID) -> None:
        """Runs it to its end. While it waits for its job or for others it has no thread, as hundreds may wait. PersistFailed,
        if the store is away."""
        let_go, is_over = Event(), False
        under_way: UnderWay | None = None

        def look() -> None:
            nonlocal under_way, is_over
            under_way = under_way or self._under_way(rehearsal_id, let_go)
            is_over = under_way is None or self._moved_on(under_way)

        try:
            while not is_over:
                await in_a_thread(look, let_go.set)
                if not is_over:
                    await asyncio.sleep(WAIT_POLL_S)
        finally:
            if under_way is not None:
                await in_a_thread(under_way.close)

    def run(self, rehearsal_id: UUID, let_go: Event) -> None:
        """Blocks until it has ended or was let go of."""
        under_way = self._under_way(rehearsal_id, let_go)
        if under_way is None:
            return
        try:
            while not self._moved_on(under_way) and not let_go.wait(WAIT_POLL_S):
                pass
        finally:
            under_way.close()

    def _under_way(self, rehearsal_id: UUID, let_go: Event) -> UnderWay | None:
        """None: it is gone, or this version cannot read it."""
        try:
            rehearsal = self._rooms.store.rehearsals.get(rehearsal_id)
        except NotFound:
            return None
        except Unreadable as error:
            log.warning("a rehearsal is left alone", rehearsal=str(rehearsal_id), cause=error.detail)
            return None
        under_way = UnderWay(rehearsal, self._rooms, self._ca_file, self.screens, let_go, self._begin_network)
        under_way.networks = self._networks
        return under_way

    def _moved_on(self, under_way: UnderWay) -> bool:
        """Moves it as far as it goes now. Whether that is all: it has ended, or was let go of."""
        if under_way.rehearsal.id in self._left:
            with suppress(LetGo):
                sweep_here(under_way)
                self._left.discard(under_way.rehearsal.id)
            return True
        names = {"rehearsal": str(under_way.rehearsal.id), "job": str(under_way.rehearsal.migration_id)}
        with structlog.contextvars.bound_contextvars(**names):
            try:
                while not under_way.rehearsal.ended:
                    self._move(under_way)
            except NotYet:
                return False
            except LetGo:
                return True
        log.info("a rehearsal has ended", rehearsal=names["rehearsal"], state=str(under_way.rehearsal.state))
        return True

    def _move(self, under_way: UnderWay) -> None:
        state = under_way.rehearsal.state
        try:
            if state is not RehearsalState.SWEEPING and state is not RehearsalState.WAITING:
                under_way.check()
                refuse_lost(under_way)
            changes = STEPS[state](under_way)
        except (PersistFailed, LetGo, NotYet):
            raise
        except SynvirtError as error:
            if under_way.let_go.is_set():  # what ran for it was stopped
                raise LetGo from error
            if under_way.cancelled(anew=True):  # the job that cuts over ends its guest
                error = Cancelled()
            if under_way.waits_out(error):
                raise NotYet from error
            if not isinstance(error, Cancelled):
                log.warning("a rehearsal fails", state=str(state), code=error.code, detail=error.detail)
            changes = failed(under_way, error)
        except Exception as error:
            log.exception("a step of a rehearsal failed in a way that it should not", state=str(state))
            changes = failed(under_way, unforeseen(error, state))
        under_way.away_since = None
        if (shown := under_way.rehearsal.error) is not None and not shown.fatal:
            changes = {"error": None, **changes}
        if changes:
            under_way.move(**changes)

    def _forget_screens(self) -> None:
        """Removes the pictures of rehearsals that exist no more."""
        try:
            known = self._rooms.store.rehearsals.ids()
            for path in self.screens.glob("*.p*"):
                if UUID(path.stem) not in known:
                    path.unlink()
        except (OSError, ValueError, SynvirtError) as error:
            log.warning("pictures of old rehearsals cannot be removed now", cause=str(error))
