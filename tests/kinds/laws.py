"""What holds for every kind of job, at each of its moments: the commits of the store, and what a world names besides.

killed      the service dies there, and is started again: the job completes, with the right bytes
cancelled   the operator cancels there: the job ends Cancelled, all is as it was found
both        nothing is left: volumes, snapshots, files, domains, ledger, slots, processes

A service that has died does nothing any more: its store answers nobody, so no thread of it gets further than that. Or it is not
killed at all, but what a kill would leave is copied at each moment (tests/kinds/copies.py): then one run serves all moments.
"""

import shutil
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from sqlalchemy import event, select

from synvirt.errors import BackupConflict, Conflict
from synvirt.store import Store
from synvirt.store.tables import slots
from tests.house import Crash
from tests.kinds.copies import copy, copy_as_killed
from tests.running.processes import until, workers

# More moments than any job here has: one that never ends is a failure, not a long test.
MOMENTS_MAX = 200
End = Literal["Completed", "Failed", "Cancelled"]


@dataclass
class Place:
    """Where one job lives through several services. `outside`: what outlives a service, by name. `host`: the hypervisor, for
    worlds that need a real one. `closing`: what goes when the place does. `prepared`: shared by all places of a test."""

    folder: Path
    host: Any = None
    data_dir: Path | None = None
    outside: dict[str, Any] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)
    prepared: list["Prepared"] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """What a service prepared once for all moments of a test, and ended. Each moment has a copy of it, which lies at `folder`:
    rows name files by their paths."""

    folder: Path
    kept: Path
    outside: dict[str, Any]


class World:
    """A service over a place, started. The next one over the same place is the service that starts after it."""

    store: Store

    def prepare(self) -> None:
        """What there is before the job: by the first service, and before it can die."""

    def submit(self) -> UUID:
        """The job, as its user asks for it."""
        raise NotImplementedError

    def found(self) -> UUID | None:
        """The job that was there when this service started."""
        raise NotImplementedError

    def run(self, job_id: UUID) -> End:
        """To its end."""
        raise NotImplementedError

    def cancel(self, job_id: UUID) -> None:
        """Conflict, where it has ended."""
        raise NotImplementedError

    def check(self, job_id: UUID) -> None:
        """It came to what it was to come to."""
        raise NotImplementedError

    def check_undone(self, job_id: UUID) -> None:
        """All is as it was found."""

    def check_started(self) -> None:
        """A service that died was started again, and has not gone on yet with anything."""

    def check_not_again(self) -> None:
        """The job has ended. What services that died had done of it was not done again by this one."""

    def left(self, job_id: UUID | None) -> list[str]:
        """Whatever is there and should not be. `job_id`: the job that completed, whose own things are its user's."""
        raise NotImplementedError

    def steps(self) -> Sequence[tuple[object, str]]:
        """Calls after which the service may die too, as (holder, name): what they do is no commit."""
        return ()

    def is_moment(self) -> bool:
        """Asked in the thread that has just committed."""
        return True

    def remember(self) -> None:
        """For the checks of the service that comes after it, should it die now."""

    def die(self) -> None:
        """Its threads end, as those of a service that was killed: whatever they ask of the store ends them."""

    def close(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Kind:
    """A line of the table. `name`: as the product calls it. `ends`: as it does when nothing happens to it.

    `once`: what it prepares is a job too, and the same each time.
    `copied`: it runs once, and its place is copied at each moment. For kinds whose files all lie in its folder, and whose
    hypervisor can be copied: the others run anew up to each moment.
    `parts`: how many tests share its moments. `taken`: those of its parts that are run, where lines of one course and other
    trouble take them all together. `surely`: so many moments at least.
    `kills`, `cancels`: whether that law is tried on it.
    `late`: so many moments may follow a wish that comes after the last look for it.
    `cancelled_at`: the service dies at each moment after the job was cancelled at that one, too.
    `meanwhile`: what goes on outside between a service's death, at that moment, and the next start."""

    name: str
    way: str
    world: Callable[[Place], World]
    ends: End = "Completed"
    parts: int = 1
    taken: Sequence[int] | None = None
    real: bool = False
    once: bool = False
    copied: bool = False
    threads: bool = False
    kills: bool = True
    cancels: bool = True
    surely: int = 5
    late: int = 4
    cancelled_at: int | None = None
    meanwhile: Callable[[Place, int], None] = lambda place, moment: None

    def __str__(self) -> str:
        return f"{self.name}, {self.way}"


class Moments:
    """Of a service: counted from 1, over all its threads. `then` is called at each of `at`, after what was done there; who
    `is_dead` takes no step any more."""

    def __init__(
        self,
        world: World,
        at: Container[int],
        then: Callable[[int], None],
        patched: pytest.MonkeyPatch,
        is_dead: Callable[[], bool] = lambda: False,
    ) -> None:
        self.count, self._at, self._then, self._is_dead = 0, at, then, is_dead
        self._is_moment, self._is_over, self.is_reached = world.is_moment, False, False
        self._lock = threading.Lock()
        world.store.on_commit = self._happened
        for holder, name in world.steps():
            patched.setattr(holder, name, self._counted(getattr(holder, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            if self._is_dead():
                raise Crash
            answer = call(*arguments, **named)
            self._happened()
            return answer

        return counted

    def over(self) -> None:
        """What is done from now on is done by the test. A job's end may be seen before its last commit is counted."""
        with self._lock:
            self._is_over = True

    def _happened(self) -> None:
        moment = self._counted_now()
        if moment in self._at:
            self._then(moment)

    def _counted_now(self) -> int:
        """0 where it is none."""
        with self._lock:
            if self._is_over or not self._is_moment():
                return 0
            self.count += 1
            self.is_reached |= self.count in self._at
            return self.count


class Death:
    """Of a service. From then on nobody gets anything from its store, nor anything into it."""

    def __init__(self, store: Store) -> None:
        self.happened = False
        event.listen(store._engine, "before_cursor_execute", self._asked)

    def happens(self, moment: int = 0) -> None:
        self.happened = True
        raise Crash

    def _asked(self, *_: object) -> None:
        if self.happened:
            raise Crash


def slots_held(store: Store) -> list[str]:
    with store._engine.connect() as db:
        return [f"slot {row.resource} of {row.job_id}" for row in db.execute(select(slots))]


def nothing_left(world: World, job_id: UUID | None) -> None:
    left = [*world.left(job_id), *slots_held(world.store), *(f"worker {pid}" for pid in workers())]
    assert left == [], left


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_at(kind: Kind, place: Place, moment: int) -> int | None:
    """How many moments the job has, where it has not that one."""
    with first(kind, place) as world, pytest.MonkeyPatch.context() as patched:
        death = Death(world.store)
        moments = Moments(world, {moment}, death.happens, patched, lambda: death.happened)
        ended: End | None = None
        with suppress(Crash):
            job_id = world.submit()
            ended = world.run(job_id)
        moments.over()
        if not moments.is_reached:
            assert ended == kind.ends, problem_of(world, job_id)
            _well(kind, world, job_id)
            return moments.count
        world.die()
        world.remember()
    kind.meanwhile(place, moment)
    _goes_on(kind, place)
    return None


def killed_at_each(kind: Kind, place: Place, moments: range, places: Callable[[str], Place]) -> None:
    """The same as `killed_at`, of a job that is run once. Services that go on from a copy find it where it was made: rows name
    files by their paths."""
    left: list[tuple[int, Path, dict[str, Any]]] = []

    def leave(moment: int) -> None:
        copied = place.folder.with_name(f"{place.folder.name}-{moment}")
        left.append((moment, copied, copy_as_killed(place.folder, copied, outlives)))

    def outlives() -> dict[str, Any]:
        world.remember()
        return place.outside

    with place.closing, first(kind, place) as world, pytest.MonkeyPatch.context() as patched:
        counted = Moments(world, moments, leave, patched)
        job_id = world.submit()
        ended = world.run(job_id)
        counted.over()
        assert ended == kind.ends, problem_of(world, job_id)
        _well(kind, world, job_id)
    assert MOMENTS_MAX > counted.count >= kind.surely, f"{counted.count} moments: is it the whole job?"
    for moment, copied, outside in left:
        shutil.rmtree(place.folder)
        copied.rename(place.folder)
        again = replace(places(f"gone-on-{moment}"), folder=place.folder, outside=outside, prepared=place.prepared)
        with again.closing:
            kind.meanwhile(again, moment)
            _goes_on(kind, again)


def _goes_on(kind: Kind, place: Place) -> None:
    with next_service(kind, place) as world:
        world.check_started()
        found = world.found()
        # Where the service died before the job was there, its caller saw that, and asks again.
        job_id = world.submit() if found is None else found
        ended = world.run(job_id)
        assert ended == kind.ends, problem_of(world, job_id)
        if found is not None:
            world.check_not_again()
        _well(kind, world, job_id)


def _well(kind: Kind, world: World, job_id: UUID) -> None:
    if kind.ends == "Completed":
        world.check(job_id)
    else:
        world.check_undone(job_id)
    nothing_left(world, job_id if kind.ends == "Completed" else None)


# ── cancelled ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cancelled_at(kind: Kind, place: Place, moment: int) -> int | None:
    """How many moments the job has, where the wish came too late to end it before. Nobody can cancel a job whose id is not
    known yet: at those moments the wish comes as soon as it is."""
    with first(kind, place) as world, pytest.MonkeyPatch.context() as patched:
        known: list[UUID] = []
        moments = Moments(world, {moment}, lambda _: _wish(world, known), patched)
        known.append(world.submit())
        reported = moments.count
        # Guests of a real hypervisor go their whole way there.
        if moment <= reported and not kind.real:
            _wish(world, known)
        ended = world.run(known[0])
        moments.over()
        if ended == "Cancelled":
            world.check_undone(known[0])
            nothing_left(world, None)
            return None
        # The wish came after the last moment at which a step looks for it, or a thread had done all before its id was known.
        assert moment <= reported or moments.count - moment <= kind.late, f"{moments.count - moment} moments after the wish"
        assert ended == "Completed", problem_of(world, known[0])
        world.check(known[0])
        nothing_left(world, known[0])
        return moments.count


def _wish(world: World, known: list[UUID]) -> None:
    if known:
        with suppress(Conflict, BackupConflict):  # the moment was the job's last: it has ended
            world.cancel(known[0])


def killed_while_cancelled(kind: Kind, place: Place, moment: int) -> int | None:
    """The service dies so many moments after the job was cancelled. How many there are, where there are not that many."""
    assert kind.cancelled_at is not None
    with first(kind, place) as world:
        death, known = Death(world.store), list[UUID]()
        after = 0

        def committed() -> None:
            nonlocal after
            if not world.is_moment():
                return
            after += 1
            if after == kind.cancelled_at:
                until(lambda: known)  # a run begins before who asked for it has its id
                _wish(world, known)
            elif after == (kind.cancelled_at or 0) + moment:
                death.happens()

        # The wish is a commit of its own, and no moment.
        world.store.on_commit = committed
        with suppress(Crash):
            known.append(world.submit())
            assert world.run(known[0]) == "Cancelled"
        world.store.on_commit = lambda: None
        if not death.happened:
            nothing_left(world, None)
            return after - kind.cancelled_at
        world.die()
    with next_service(kind, place) as world:
        assert world.run(known[0]) == "Cancelled", problem_of(world, known[0])
        world.check_undone(known[0])
        nothing_left(world, None)
    return None


# ── services, one after the other ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def first(kind: Kind, place: Place) -> Iterator[World]:
    if kind.once:
        _lay_out(kind, place)
    else:
        place.folder.mkdir()
    with next_service(kind, place) as world:
        if not kind.once:
            world.prepare()
        yield world


def _lay_out(kind: Kind, place: Place) -> None:
    if not place.prepared:
        place.folder.mkdir()
        with next_service(kind, place) as world:
            world.prepare()
        kept = place.folder.rename(place.folder.with_name("prepared"))
        place.prepared.append(Prepared(place.folder, kept, deepcopy(place.outside)))
    (prepared,) = place.prepared
    shutil.rmtree(prepared.folder, ignore_errors=True)
    copy(prepared.kept, prepared.folder)
    place.folder, place.outside = prepared.folder, deepcopy(prepared.outside)


@contextmanager
def next_service(kind: Kind, place: Place) -> Iterator[World]:
    world = kind.world(place)
    try:
        yield world
    finally:
        world.store.on_commit = lambda: None
        world.close()


def problem_of(world: World, job_id: UUID) -> str:
    """As it was reported: for people who read a failure."""
    return str(getattr(world, "problem", lambda _: "")(job_id))


# None: there may be later moments.
Law = Callable[[Kind, Place, int], int | None]


def holds(law: Law, kind: Kind, part: int, places: Callable[[str], Place]) -> None:
    """At each moment of this part, until the job has none left. `places` makes one of a name."""
    with pytest.MonkeyPatch.context() as patched:
        # A thread that dies with its service does not fail the test.
        reported = threading.excepthook
        patched.setattr(threading, "excepthook", lambda raised: None if raised.exc_type is Crash else reported(raised))
        _holds(law, kind, part, places)


def _holds(law: Law, kind: Kind, part: int, places: Callable[[str], Place]) -> None:
    prepared: list[Prepared] = []
    if law is killed_at and kind.copied:
        place = replace(places(law.__name__), prepared=prepared)
        killed_at_each(kind, place, range(1 + part, MOMENTS_MAX, kind.parts), places)
        return
    for moment in range(1 + part, MOMENTS_MAX, kind.parts):
        place = replace(places(f"{law.__name__}-{moment}"), prepared=prepared)
        with place.closing:
            count = law(kind, place, moment)
        # There is no later one. A run to which nothing happens is the first one of the kinds that are killed.
        if count is not None and count < moment + kind.parts:
            assert count >= kind.surely or law is killed_while_cancelled, f"only {count} moments: is it the whole job?"
            return
    pytest.fail(f"{kind} has over {MOMENTS_MAX} moments")


LAWS: dict[str, Law] = {"killed": killed_at, "cancelled": cancelled_at, "killed while cancelled": killed_while_cancelled}


def cases(kinds: Sequence[Kind], *, real: bool) -> list[Any]:
    """Each law of each kind in its parts, which workers of pytest share."""
    found = []
    for kind in kinds:
        if kind.real is not real:
            continue
        laws = ["killed"] if kind.kills else []
        laws += ["cancelled"] if kind.cancels else []
        laws += ["killed while cancelled"] if kind.cancelled_at is not None else []
        found += [
            pytest.param(kind, law, part, id=f"{kind}, {law}, {part}")
            for law in laws
            for part in kind.taken or range(kind.parts)
        ]
    return found
