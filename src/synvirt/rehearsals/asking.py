"""The rehearsals' functions for the API and the page. Blocking code."""

import json
from collections.abc import Callable, Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import islice
from typing import Any, Protocol
from uuid import UUID, uuid4

from synvirt.acting import submitter
from synvirt.destinations import Destination
from synvirt.errors import Conflict, HostLacks, NotFound
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.rehearsal import (
    MEMBERS_LEAST,
    MEMBERS_MAX,
    Rehearsal,
    RehearsalRequest,
    RehearsalState,
    RehearsedJob,
    Together,
    TogetherRequest,
)
from synvirt.model.values import now
from synvirt.rehearsals.steps import BEFORE_CUT_OVER
from synvirt.store import Store
from synvirt.store.documents import Unreadable


class Engine(Protocol):
    """See Rehearsals."""

    def begin(self, rehearsal_id: UUID) -> None: ...
    def screenshot(self, rehearsal_id: UUID) -> bytes | None: ...


class Rehearsing:
    """`destination_named`: a destination of this host; without a name, the default. `wake(job_id)`: makes the job check at once
    whether something is asked of it."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        host: str,
        destination_named: Callable[[str | None], Destination],
        wake: Callable[[UUID], None],
    ) -> None:
        self._store, self._rows, self._engine, self._host = store, store.rehearsals, engine, host
        self._destination_named, self._wake = destination_named, wake

    def ask(self, job_id: UUID, asked: RehearsalRequest) -> Rehearsal:
        """Asks for a rehearsal of a job that copies warm and has not begun its cut-over. NotFound, Conflict, HostLacks."""
        here = self._may_be(self._store.get(job_id), self._store.host_of(job_id))
        rehearsal = Rehearsal(id=uuid4(), migration_id=job_id, asked=asked, submitted_by=submitter(), created_at=now())
        self._rows.add([rehearsal])
        if here:
            self._begin([rehearsal])
        return rehearsal

    def ask_together(self, asked: TogetherRequest) -> list[Rehearsal]:
        """Asks for rehearsals of all these jobs, or none. Conflict, if they are too few or one is named twice; NotFound,
        HostLacks."""
        members = [(one, self._store.get(one.migration_id)) for one in asked.members]
        if not members and asked.wave_id is not None:
            members = self._of_wave(asked.wave_id)
        ids = [job.id for _, job in members]
        if len(set(ids)) < MEMBERS_LEAST or len(set(ids)) != len(ids) or len(ids) > MEMBERS_MAX:
            raise Conflict(
                f"{len(set(ids))} jobs are to be rehearsed together",
                hint=f"name {MEMBERS_LEAST} to {MEMBERS_MAX} jobs, each once, or a wave with this many members that copy warm",
            )
        hosts = [self._store.host_of(one) for one in ids]
        here = {self._may_be(job, host) for (_, job), host in zip(members, hosts, strict=True)}
        if len(set(hosts)) > 1:
            raise Conflict("these jobs are on several hosts", hint="rehearse those of one host together")
        if unknown := [str(job.id) for _, job in members if job.manifest is None]:
            raise Conflict(f"job {unknown[0]} has not looked at its VM yet", hint="wait until it copies")
        together = Together(id=uuid4(), rehearsals=tuple(uuid4() for _ in ids))
        made = [
            Rehearsal(
                id=rehearsal_id,
                migration_id=one.migration_id,
                asked=RehearsalRequest(checks=one.checks),
                together=together,
                submitted_by=submitter(),
                created_at=now(),
            )
            for (one, _), rehearsal_id in zip(members, together.rehearsals, strict=True)
        ]
        self._rows.add(made)
        if here == {True}:
            self._begin(made)
        return made

    def may_be_together(self, job_ids: Iterable[UUID]) -> bool:
        """Whether enough of these jobs copy warm now. It reads no more of them than that takes."""
        jobs = map(self._job, job_ids)
        warm = (job for job in jobs if job is not None and why_not(job) is None)
        return len(list(islice(warm, MEMBERS_LEAST))) == MEMBERS_LEAST

    def _of_wave(self, wave_id: UUID) -> list[tuple[RehearsedJob, Migration]]:
        """The wave's members whose jobs copy warm now, with their checks; each after those that it waits for."""
        self._store.waves.get(wave_id)
        rows = self._store.waves.members(wave_id)[0]
        documents = {one.member_id: json.loads(one.document) for one in rows}
        jobs = {one.member_id: self._job(one.job_id) for one in rows if one.job_id is not None}
        return [
            (RehearsedJob.model_validate({"migration_id": str(job.id), "checks": _checks(documents[name])}), job)
            for name in _in_order(documents.values())
            if (job := jobs.get(name)) is not None and why_not(job) is None
        ]

    def _job(self, job_id: UUID) -> Migration | None:
        """None: it was removed, or was refused when the wave submitted it; or this version cannot read it."""
        try:
            return self._store.get(job_id)
        except (NotFound, Unreadable):
            return None

    def _begin(self, rehearsals: Sequence[Rehearsal]) -> None:
        for one in rehearsals:
            self._wake(one.migration_id)
            self._engine.begin(one.id)

    def _may_be(self, job: Migration, host: str) -> bool:
        """Checks that this host can rehearse it. Conflict, HostLacks."""
        if (why := why_not(job)) is not None:
            raise Conflict(f"job {job.id} cannot be rehearsed: {why}")
        here = host == self._host
        if here:
            destination = self._destination_named(job.destination or job.plan.target.destination)
            if (lacks := destination.why_no_clones()) is not None:
                raise HostLacks(
                    f"job {job.id} cannot be rehearsed: {lacks}",
                    hint="keep the volumes on zfs, XFS, Btrfs, or in Ceph",
                )
        return here

    def of(self, job_id: UUID) -> list[Rehearsal]:
        """The job's rehearsals, newest first. NotFound, if there is no such job."""
        return self._rows.of(self._store.get(job_id).id)

    def page(self, job_id: UUID, *, limit: int, cursor: int | None) -> tuple[list[Rehearsal], int | None]:
        """A page of the job's rehearsals, newest first, and the cursor of the next page (None: this was the last). NotFound."""
        return self._rows.page(self._store.get(job_id).id, limit=limit, cursor=cursor)

    def states_of(self, job_ids: Sequence[UUID]) -> dict[UUID, RehearsalState]:
        """The state of the newest rehearsal of each job that has one."""
        return self._rows.states_of(job_ids)

    def get(self, job_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """NotFound."""
        found = self._rows.get(rehearsal_id)
        if found.migration_id != job_id:
            raise NotFound(f"job {job_id} has no rehearsal {rehearsal_id}", hint="its list of rehearsals shows those there are")
        return found

    def cancel(self, job_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """Cancels the rehearsal. It ends as soon as all that it made is removed. NotFound; Conflict, if it has ended."""
        self.get(job_id, rehearsal_id)
        self._rows.cancel(rehearsal_id)
        return self._rows.get(rehearsal_id)

    def screenshot(self, job_id: UUID, rehearsal_id: UUID) -> bytes:
        """A PNG. NotFound."""
        picture = self._engine.screenshot(self.get(job_id, rehearsal_id).id)
        if picture is None:
            raise NotFound(f"rehearsal {rehearsal_id} has no screenshot", hint="only a guest that was started leaves one")
        return picture


def _in_order(members: Iterable[dict[str, Any]]) -> list[str]:
    """Names of a wave's members and of their groups; each after those that it waits for. A wave has no circle."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for one in members:
        graph.add(one["id"], *one.get("after", []))
        if one.get("group"):
            graph.add(one["group"], one["id"])
    return list(graph.static_order())


def _checks(member: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks of a wave's member, in a rehearsal's form."""
    return [{name: value for name, value in one.items() if value not in (None, [])} for one in member.get("checks", [])]


def why_not(job: Migration) -> str | None:
    """Why it cannot be rehearsed now; None, if it can."""
    if job.ended:
        return f"it has ended, as {job.state}"
    if job.mode_effective is not Mode.WARM:
        return "it copies cold, and its guest starts as soon as the copy is whole"
    if job.state not in BEFORE_CUT_OVER:
        return f"it is in {job.state}: its volumes are the guest's own by now"
    return None
