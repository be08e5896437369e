"""How far each pass of a job is durable, a row for each disk; in the store's transactions."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from synvirt.store.tables import watermarks

# Made once: to make a statement costs more than SQLite takes to answer it. The update sets what it is given besides.
_UPDATE = update(watermarks).where(
    watermarks.c.migration_id == bindparam("job"),
    watermarks.c.pass_number == bindparam("of_pass"),
    watermarks.c.disk_key == bindparam("of_disk"),
)
_INSERT = insert(watermarks)
_OF_JOB = watermarks.c.migration_id == bindparam("job")
_OF_PASS = select(watermarks).where(_OF_JOB, watermarks.c.pass_number == bindparam("of_pass"))
_COPIED_BEFORE = (
    select(watermarks.c.disk_key, func.sum(watermarks.c.bytes_done), func.sum(watermarks.c.bytes_zero))
    .where(_OF_JOB, watermarks.c.pass_number < bindparam("of_pass"))
    .group_by(watermarks.c.disk_key)
)
_COUNTED = ("bytes_total", "bytes_done", "bytes_zero")
_OLD = (_OF_JOB, watermarks.c.pass_number != 1, watermarks.c.pass_number < bindparam("of_pass"))
_OLD_SUMS = (
    select(watermarks.c.disk_key, *(func.sum(watermarks.c[name]) for name in _COUNTED))
    .where(*_OLD)
    .group_by(watermarks.c.disk_key)
)
_FORGET_OLD = delete(watermarks).where(*_OLD)
# Passes are counted from 1.
FOLDED_PASS = 0


@dataclass(frozen=True, slots=True)
class Watermark:
    """Every byte of the pass before `offset_bytes` is flushed; `finished`: the whole pass of this disk is."""

    disk_key: str
    pass_number: int
    offset_bytes: int
    bytes_total: int
    bytes_done: int
    bytes_zero: int
    finished: bool


def put(db: Connection, job_id: UUID, mark: Watermark) -> None:
    """Writes or replaces the watermark of a disk in a pass, in the caller's transaction. Offsets and counts are bytes."""
    values = {
        "offset_bytes": mark.offset_bytes,
        "bytes_total": mark.bytes_total,
        "bytes_done": mark.bytes_done,
        "bytes_zero": mark.bytes_zero,
        "finished": mark.finished,
    }
    key = {"migration_id": str(job_id), "pass_number": mark.pass_number, "disk_key": mark.disk_key}
    same = {"job": str(job_id), "of_pass": mark.pass_number, "of_disk": mark.disk_key}
    if db.execute(_UPDATE, {**same, **values}).rowcount == 0:
        db.execute(_INSERT, {**key, **values})


def of_pass(db: Connection, job_id: UUID, number: int) -> dict[str, Watermark]:
    """The watermarks of a pass, by disk key."""
    return {row.disk_key: _of_row(row) for row in db.execute(_OF_PASS, {"job": str(job_id), "of_pass": number})}


def copied_before(db: Connection, job_id: UUID, number: int) -> dict[str, tuple[int, int]]:
    """By disk key: bytes that all passes before that one moved, and bytes of zeros among them."""
    found = db.execute(_COPIED_BEFORE, {"job": str(job_id), "of_pass": number})
    return {key: (int(done), int(zero)) for key, done, zero in found}


def forget(db: Connection, job_id: UUID, disk_key: str) -> None:
    """Forgets all watermarks of a disk."""
    db.execute(delete(watermarks).where(watermarks.c.migration_id == str(job_id), watermarks.c.disk_key == disk_key))


def fold(db: Connection, job_id: UUID, number: int) -> None:
    """Joins the passes before `number` into one watermark for each disk, with FOLDED_PASS as its number. The first pass
    stays."""
    of_passes = {"job": str(job_id), "of_pass": number}
    found = db.execute(_OLD_SUMS, of_passes).all()
    db.execute(_FORGET_OLD, of_passes)
    for disk_key, *sizes in found:
        folded = dict(zip(_COUNTED, map(int, sizes), strict=True))
        values = {"pass_number": FOLDED_PASS, "disk_key": disk_key, "offset_bytes": 0, "finished": True}
        db.execute(_INSERT, {"migration_id": str(job_id), **values, **folded})


def _of_row(row: Row[Any]) -> Watermark:
    return Watermark(
        disk_key=row.disk_key,
        pass_number=row.pass_number,
        offset_bytes=row.offset_bytes,
        bytes_total=row.bytes_total,
        bytes_done=row.bytes_done,
        bytes_zero=row.bytes_zero,
        finished=row.finished,
    )
