"""Queries about rehearsals, in the store's transactions. A rehearsal belongs to the host that has its job."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from uuid import UUID

from pydantic_core import to_json
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from synvirt.errors import Conflict, not_listed
from synvirt.model.rehearsal import REHEARSED, Rehearsal, RehearsalState
from synvirt.store.documents import VERSION, is_known, parsed, readable, rewritten, version_after, written
from synvirt.store.tables import migrations, rehearsals

Transaction = Callable[[], AbstractContextManager[Connection]]
# Ended rehearsals that are kept for each job: an operator compares the last few.
KEPT = 20
_ENDED = tuple(str(state) for state in REHEARSED)
# Made once: to make a statement costs more than SQLite takes to answer it.
_REHEARSAL = select(rehearsals).where(rehearsals.c.id == bindparam("rehearsal"))
_OF_JOB = (
    select(rehearsals.c.document)
    .where(rehearsals.c.migration_id == bindparam("job"), is_known(rehearsals.c.version))
    .order_by(rehearsals.c.number.desc())
)
_UNENDED = select(rehearsals.c.id).where(rehearsals.c.migration_id == bindparam("job"), rehearsals.c.state.not_in(_ENDED))


class RehearsalRows:
    """The rehearsals of jobs."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, added: Sequence[Rehearsal]) -> None:
        """Adds all of them, or none. Conflict, where a job has one that has not ended; NotFound, where there is no such job.
        The oldest ended ones are removed."""
        with self._writing() as db:
            # Locks the jobs' rows, so that of two requests at once one sees the other; in one order, so that there is no
            # deadlock.
            ids = sorted(str(one.migration_id) for one in added)
            locked = select(migrations.c.id).where(migrations.c.id.in_(ids)).order_by(migrations.c.id).with_for_update()
            known = {row.id for row in db.execute(locked)}
            for one in added:
                _add(db, one, known)

    def get(self, rehearsal_id: UUID) -> Rehearsal:
        """The rehearsal. NotFound."""
        with self._reading() as db:
            row = db.execute(_REHEARSAL, {"rehearsal": str(rehearsal_id)}).first()
        if row is None:
            raise not_listed("rehearsal", rehearsal_id)
        return parsed(Rehearsal, row.document, row.version)

    def of(self, job_id: UUID) -> list[Rehearsal]:
        """The rehearsals of a job, newest first."""
        with self._reading() as db:
            return readable(Rehearsal, db.execute(_OF_JOB, {"job": str(job_id)}).scalars())

    def page(self, job_id: UUID, *, limit: int, cursor: int | None = None) -> tuple[list[Rehearsal], int | None]:
        """A page of a job's rehearsals, newest first, and the cursor of the next page (None: this was the last)."""
        query = _OF_JOB.add_columns(rehearsals.c.number)
        if cursor is not None:
            query = query.where(rehearsals.c.number < cursor)
        with self._reading() as db:
            rows = db.execute(query.limit(limit + 1), {"job": str(job_id)}).all()
        found = readable(Rehearsal, [row.document for row in rows[:limit]])
        return found, rows[limit - 1].number if len(rows) > limit else None

    def states_of(self, job_ids: Sequence[UUID]) -> dict[UUID, RehearsalState]:
        """The state of each job's newest rehearsal, for the jobs that have one."""
        of_jobs = rehearsals.c.migration_id.in_([str(one) for one in job_ids])
        query = select(rehearsals.c.migration_id, rehearsals.c.state).where(of_jobs).order_by(rehearsals.c.number)
        with self._reading() as db:
            found = db.execute(query).all()
        # A later version may have other states.
        return {UUID(row.migration_id): RehearsalState(row.state) for row in found if row.state in set(RehearsalState)}

    def waiting(self, job_id: UUID) -> Rehearsal | None:
        """The rehearsal that waits for the job's volumes to be complete. None, where there is none or it is to be cancelled."""
        return next(
            (one for one in self.of(job_id) if one.state is RehearsalState.WAITING and not self.is_cancelled(one.id)), None
        )

    def has_unended(self, job_id: UUID) -> bool:
        """Whether a rehearsal of the job is under way."""
        with self._reading() as db:
            return db.execute(_UNENDED, {"job": str(job_id)}).first() is not None

    def unended_ids(self, *, host: str) -> list[UUID]:
        """The ids of the unended rehearsals of a host's jobs, oldest first."""
        query = select(rehearsals.c.id).join(migrations, migrations.c.id == rehearsals.c.migration_id)
        chosen = (migrations.c.host == host, rehearsals.c.state.not_in(_ENDED))
        with self._reading() as db:
            return [UUID(row.id) for row in db.execute(query.where(*chosen).order_by(rehearsals.c.number))]

    def left_ids(self, *, host: str) -> list[UUID]:
        """The ids of the rehearsals that this host had, and whose jobs other hosts have taken over."""
        query = select(rehearsals.c.document).join(migrations, migrations.c.id == rehearsals.c.migration_id)
        chosen = (migrations.c.host != host, is_known(rehearsals.c.version))
        named = rehearsals.c.document.contains(to_json(host).decode(), autoescape=True)
        with self._reading() as db:
            found = readable(Rehearsal, db.execute(query.where(*chosen, named)).scalars())
        return [one.id for one in found if one.host == host]

    def ids(self) -> set[UUID]:
        """The ids of all rehearsals."""
        with self._reading() as db:
            return {UUID(row.id) for row in db.execute(select(rehearsals.c.id))}

    def is_cancelled(self, rehearsal_id: UUID) -> bool:
        """Whether its end was requested."""
        with self._reading() as db:
            return bool(db.execute(select(rehearsals.c.cancel_requested).where(rehearsals.c.id == str(rehearsal_id))).scalar())

    def cancel(self, rehearsal_id: UUID) -> None:
        """Requests its end. NotFound; Conflict, where it has ended."""
        with self._writing() as db:
            row = db.execute(select(rehearsals.c.state).where(rehearsals.c.id == str(rehearsal_id))).first()
            if row is None:
                raise not_listed("rehearsal", rehearsal_id)
            if row.state in _ENDED:
                raise Conflict(f"rehearsal {rehearsal_id} has ended: it is {row.state}")
            db.execute(update(rehearsals).where(rehearsals.c.id == str(rehearsal_id)).values(cancel_requested=True))

    def cancel_of(self, job_id: UUID) -> None:
        """Requests the end of the job's rehearsal, if there is one."""
        chosen = (rehearsals.c.migration_id == str(job_id), rehearsals.c.state.not_in(_ENDED))
        with self._writing() as db:
            db.execute(update(rehearsals).where(*chosen).values(cancel_requested=True))

    def change(self, rehearsal_id: UUID, expected: RehearsalState, change: Callable[[Rehearsal], Rehearsal]) -> Rehearsal:
        """Rewrites a rehearsal that is still in `expected`, else Conflict."""
        with self._writing() as db:
            query = select(rehearsals).where(rehearsals.c.id == str(rehearsal_id))
            row = db.execute(query.with_for_update()).first()
            if row is None:
                raise not_listed("rehearsal", rehearsal_id)
            before = parsed(Rehearsal, row.document, row.version)
            if before.state is not expected:
                raise Conflict(f"rehearsal {rehearsal_id} is {before.state}, not {expected}")
            after = change(before)
            document = rewritten(row.document, before, after)
            values = {"state": str(after.state), "document": document, "version": version_after(row.version)}
            db.execute(update(rehearsals).where(rehearsals.c.number == row.number).values(**values))
        return after


def _add(db: Connection, rehearsal: Rehearsal, known: Collection[str]) -> None:
    """`known`: the ids of the existing jobs."""
    job_id = str(rehearsal.migration_id)
    of_job = rehearsals.c.migration_id == job_id
    if job_id not in known:
        raise not_listed("migration", job_id)
    present = db.execute(select(rehearsals.c.id).where(of_job, rehearsals.c.state.not_in(_ENDED))).first()
    if present is not None:
        raise Conflict(f"rehearsal {present.id} of job {job_id} has not ended", hint="wait for its end, or cancel it first")
    ended = select(rehearsals.c.number).where(of_job).order_by(rehearsals.c.number.desc()).offset(KEPT - 1)
    old = [row.number for row in db.execute(ended.limit(KEPT)).all()]
    db.execute(delete(rehearsals).where(rehearsals.c.number.in_(old)))
    values = {"id": str(rehearsal.id), "migration_id": job_id, "state": str(rehearsal.state)}
    db.execute(insert(rehearsals).values(**values, document=written(rehearsal), version=VERSION))
