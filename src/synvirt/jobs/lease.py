"""The lease of this host. While the host holds it, its jobs run. If it cannot be renewed, they end before another host may
begin.

    begin ─▶ held ─▶ renewed each RENEW_EVERY_S
              │ ▲
              │ └── renewed, or begun again: `on_held`
              ▼
             lost: silent for SELF_FENCE_S, or fenced by another ─▶ `on_lost`: workers ended, no call to a source any more

    |── lease: LEASE_S ───────────────────────────|── GRACE_S ──|  from here on another host fences this one
    |── no renewal: SELF_FENCE_S ──|  jobs ended

A renewal counts from the moment before it was requested, by a clock that goes on while the machine sleeps.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from synvirt.errors import Conflict, PersistFailed
from synvirt.jobs.runner import Threads
from synvirt.store import Store
from synvirt.store.hosts import Fence

log = structlog.get_logger(__name__)

LEASE_S, RENEW_EVERY_S, LOOK_EVERY_S = 60.0, 10.0, 1.0
# This long after the end of its lease a host counts as dead. It ended its jobs before: SELF_FENCE_S after the last renewal.
GRACE_S = 30.0
SELF_FENCE_S = 40.0
# How long to try to begin: the database may keep the session of a process that was just killed for a moment.
CLAIM_WITHIN_S, CLAIM_LOOK_S = 15.0, 0.2
# How long the end waits for a renewal that is under way; it ends with the process anyway.
END_TIMEOUT_S = 2.0


def boot_clock() -> float:
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Pausable(Protocol):
    """The jobs of a kind. `pause`: on return none of them runs; `resume`: they go on from what the store says."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Together:
    """Several kinds as one. They are paused at the same time, as each may take as long as a worker needs to end."""

    def __init__(self, kinds: Sequence[Pausable]) -> None:
        self._kinds = kinds
        self._resumed: set[int] = set()

    def pause(self) -> None:
        self._resumed.clear()
        with Threads(len(self._kinds), thread_name_prefix="pause") as pool:
            pausing = [self._pausing(pool, kind) for kind in self._kinds]
            for paused in pausing:
                paused()

    def _pausing(self, pool: Threads, kind: Pausable) -> Callable[[], None]:
        """What waits for it. Where the host has no thread, it is paused in this one."""
        try:
            return pool.submit(kind.pause).result
        except RuntimeError:
            return kind.pause

    def resume(self) -> None:
        """Raises an error of a kind after it has tried all. The next call tries those again that have not resumed."""
        failure: Exception | None = None
        for number, kind in enumerate(self._kinds):
            if number not in self._resumed:
                try:
                    kind.resume()
                    self._resumed.add(number)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure


class HostLease:
    """`document()` describes this host, as JSON. `on_lost` and `on_held` are called in turns, never at once, `on_lost` first;
    each returns when it is done. An `on_held` that raises is called again at each renewal."""

    def __init__(
        self,
        store: Store,
        host: str,
        *,
        document: Callable[[], str] = lambda: "{}",
        on_lost: Callable[[], None],
        on_held: Callable[[], None],
        clock: Callable[[], float] = boot_clock,
        lease_s: float = LEASE_S,
        claim_within_s: float = CLAIM_WITHIN_S,
    ) -> None:
        """Times scale with `lease_s`, for tests."""
        self._store, self._host, self._document, self._clock = store, host, document, clock
        self._on_lost, self._on_held = on_lost, on_held
        self._lease_s, self._claim_within_s = lease_s, claim_within_s
        self._scale = lease_s / LEASE_S
        self._claim = store.claim_host(host)
        self._fence: Fence | None = None
        self._renewed_at = self._held_since = 0.0
        self._held = self._to_resume = False
        self._failure: PersistFailed | None = None
        self._ending = threading.Event()
        # Each wakes one of the threads.
        self._renewal_due, self._look_due = threading.Event(), threading.Event()
        # Locked while the jobs are ended or begun, so that both never happen at once.
        self._turning = threading.RLock()
        # Two threads, as a database that does not answer may hold one of them forever.
        self._threads = [
            threading.Thread(target=self._repeat, args=work, daemon=True)
            for work in ((self.renew, RENEW_EVERY_S, self._renewal_due), (self.look, LOOK_EVERY_S, self._look_due))
        ]

    @property
    def held(self) -> bool:
        return self._held

    def held_for_s(self) -> float:
        """For how many seconds the lease has been held without a break."""
        return self._clock() - self._held_since if self._held else 0.0

    def failure(self) -> PersistFailed | None:
        """Why the lease was not renewed the last time that this was tried: the store failed. None: it did not."""
        failure = self._failure
        return None if failure is None else PersistFailed(failure.detail, hint=failure.hint)

    @property
    def valid_until(self) -> float:
        """The time of `boot_clock` at which this host ends its jobs, unless the lease is renewed before."""
        return self._renewed_at + SELF_FENCE_S * self._scale

    def begin(self) -> None:
        """Begins a new epoch; from now on the store is written under it. Conflict, where another process has this host's id."""
        deadline = self._clock() + self._claim_within_s
        while True:
            try:
                self._claim.hold()
                break
            except Conflict:
                if self._clock() >= deadline:
                    raise
                time.sleep(CLAIM_LOOK_S)
        self._begin_epoch()
        self._held, self._held_since = True, self._clock()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops renewing. The lease then runs out by itself: a host that is back before has lost nothing."""
        self._ending.set()
        for due in (self._renewal_due, self._look_due):
            due.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_TIMEOUT_S)
        self._claim.let_go()

    def renew_soon(self) -> None:
        """Renews at once, in its thread: what this host says of itself has changed."""
        self._renewal_due.set()

    def renew(self) -> bool:
        """Renews once. Ends the jobs if the host was fenced, and resumes them if the lease is held. False, where the store did
        not answer: it is asked again soon, as a database that is back should be seen before the jobs are ended."""
        asked_at, fence = self._clock(), self._fence
        try:
            self._claim.hold()
            renewed = fence is not None and self._store.hosts.renew(fence, ttl_s=self._lease_s, document=self._document())
        except Conflict as error:
            self._lose(error.detail)
            return True
        except PersistFailed as error:
            log.warning("the lease is not renewed", host=self._host, cause=error.detail)
            self._failure = error
            return False
        with self._turning:
            if self._ending.is_set():
                return True
            if not renewed:
                self._lose("it was fenced by another host, or by an operator")
                try:
                    self._begin_epoch()
                except PersistFailed as error:
                    log.warning("no new lease yet", host=self._host, cause=error.detail)
                    self._failure = error
                    return False
            elif self._clock() >= self.valid_until:
                self._lose(self._not_renewed)
            self._renewed_at, self._failure = asked_at, None
            if not self._held:
                self._held, self._held_since, self._to_resume = True, self._clock(), True
                log.warning("the lease is held again: jobs go on", host=self._host)
            if self._to_resume:
                self._on_held()
                self._to_resume = False
        return True

    def look(self) -> None:
        """Ends the jobs, if the lease was not renewed for too long."""
        if self._held and self._clock() >= self.valid_until:
            self._lose(self._not_renewed)

    @property
    def _not_renewed(self) -> str:
        return f"it was not renewed for {SELF_FENCE_S * self._scale:.0f} s"

    def _begin_epoch(self) -> None:
        asked_at = self._clock()
        self._fence = self._store.hosts.begin(self._host, ttl_s=self._lease_s, document=self._document())
        self._store.write_under(self._fence)
        self._renewed_at = asked_at

    def _lose(self, cause: str) -> None:
        with self._turning:
            if self._held and not self._ending.is_set():
                self._held = self._to_resume = False
                log.error("the lease of this host is lost: its jobs are ended", host=self._host, cause=cause)
                self._on_lost()

    def _repeat(self, look: Callable[[], bool | None], every_s: float, due: threading.Event) -> None:
        """An error of `on_lost` or `on_held` must not end the thread: nobody would end the jobs at the next loss."""
        answered: bool | None = True
        while True:
            due.wait((LOOK_EVERY_S if answered is False else every_s) * self._scale)
            due.clear()
            if self._ending.is_set():
                return
            try:
                answered = look()
            except Exception:
                log.exception("the lease is looked after again", host=self._host)
