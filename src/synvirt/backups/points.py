"""The restore points that this host knows, as data. Their repositories have the same data, and are the truth."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from synvirt.backups.model import BackupRepository, PointDisk, RestorePoint
from synvirt.model.values import now
from synvirt.repository.manifest import Manifest
from synvirt.store.backups import BackupRows
from synvirt.store.documents import parsed, readable

_SEALED = ("vm_id", "vm_name", "job_id", "run_id", "quiesced", "freeze_ms", "consistency")


@dataclass(slots=True)
class PointFigures:
    """`states`: how many points are in each. `newest_at`: by job and guest, when the newest point that is not damaged was made,
    in seconds since 1970. None: all of them were made by a clock that was ahead, so nobody knows when."""

    states: Counter[str] = field(default_factory=Counter)
    newest_at: dict[tuple[UUID, str], float | None] = field(default_factory=dict)

    def add(self, state: str, job_id: UUID, vm_id: str, *, count: int, newest_at: float | None) -> None:
        """Counts `count` points of a guest that a job backs up; `newest_at`: of the newest, as in this class."""
        self.states[state] += count
        if state != "damaged":
            key = (job_id, vm_id)
            known = [at for at in (newest_at, self.newest_at.get(key)) if at is not None]
            self.newest_at[key] = max(known, default=None)


class Points:
    """The restore points that this host knows, as documents in the store."""

    def __init__(self, rows: BackupRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    def get(self, point_id: UUID) -> RestorePoint:
        """BackupNotFound."""
        return parsed(RestorePoint, self._rows.get("point", point_id, host=self._host))

    def page(
        self, *, limit: int, cursor: int | None, only: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[list[RestorePoint], int | None]:
        """A page of at most `limit` points, newest first, and the cursor of the next page; None: it was the last. `only`: as in
        the store's page."""
        texts, following = self._rows.page("point", host=self._host, limit=limit, cursor=cursor, only=only)
        return readable(RestorePoint, texts), following

    def all(self, only: Mapping[str, Sequence[str]] | None = None) -> list[RestorePoint]:
        """All points, oldest first. `only`: as in the store's page."""
        return readable(RestorePoint, self._rows.all("point", host=self._host, only=only))

    def figures(self) -> PointFigures:
        """Of all points. Nearly no document is read."""
        moment = now().timestamp()
        found, (groups, others) = PointFigures(), self._rows.points_of_guests(host=self._host, moment=moment)
        for one in groups:
            state = one.state or RestorePoint.model_fields["state"].default
            found.add(state, UUID(one.job_id), one.vm_id, count=one.count, newest_at=one.newest_at)
        for point in readable(RestorePoint, others):
            made_at = point.created_at.timestamp()
            found.add(point.state, point.job_id, point.vm_id, count=1, newest_at=made_at if made_at <= moment else None)
        return found

    def guests_named(self, job_id: UUID, names: Sequence[str]) -> set[str]:
        """The ids of the guests that a job has points of under one of these names."""
        return self._rows.guests_named(job_id, names, host=self._host)

    def ids(self) -> set[UUID]:
        """The ids of all points, also of those that a later version wrote."""
        return self._rows.ids("point", host=self._host)

    def put(self, point: RestorePoint) -> RestorePoint:
        """Writes the point, new or changed."""
        self._rows.put("point", point.id, point, host=self._host)
        return point

    def change(self, point_id: UUID, **fields: object) -> RestorePoint:
        """Writes these fields, in one transaction. BackupNotFound: the point was removed, and stays so."""

        def changed(point: RestorePoint) -> RestorePoint:
            return point.model_copy(update=fields)

        return self._rows.change("point", point_id, RestorePoint, changed, host=self._host)

    def forget(self, point_id: UUID) -> None:
        """Idempotent. The point stays in its repository."""
        self._rows.remove("point", point_id, host=self._host)


def point_of(manifest: Manifest, known: BackupRepository, *, stored_bytes: int, signed_by: str | None = None) -> RestorePoint:
    """`signed_by`: the fingerprint of the key whose signature was checked."""
    shown, inside = manifest.shown, manifest.sealed
    return RestorePoint.model_validate(
        {
            **{name: getattr(inside, name) for name in _SEALED},
            "id": shown.id,
            "created_at": shown.created_at,
            "repository_id": known.id,
            "repository_kind": known.kind,
            "disks": tuple(PointDisk(target=disk.target, size_bytes=disk.size_bytes) for disk in inside.disks),
            "size_bytes": sum(disk.size_bytes for disk in inside.disks),
            "stored_bytes": stored_bytes,
            "signed_by": signed_by,
        }
    )
