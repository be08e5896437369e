"""What a migration remembers beyond what it shows: a row a pass, one of the job, one of its course.

Each has a version, as every stored document. A held job's rows are bounded: those of old passes go (`Store.fold_passes`).
"""

from datetime import datetime
from typing import ClassVar, Literal, TypeVar
from uuid import UUID

from pydantic import Field

from synvirt.jobs.course import Course
from synvirt.live import SnapshotRef
from synvirt.model.problems import Problem
from synvirt.model.values import Model
from synvirt.store.memory import Remembered

R = TypeVar("R", bound=Remembered)


class Told(Model):
    """What the job's last problem was before a passing trouble was shown. None: there was none."""

    before: Problem | None = None


class Hashed(Model):
    """The host that has hashed the volumes so far: only its files are continued."""

    host: str
    token: UUID


class PassMemory(Remembered):
    """Of one pass."""

    kind: ClassVar[str] = "pass"

    # Since when its snapshot is being made: from then on there may be one. None once more, where that is gone.
    begun_at: datetime | None = None
    # With the change ids that the next pass counts from; None while there is none.
    snapshot: SnapshotRef | None = None
    # The moment of the source that it copies.
    snapshot_at: datetime | None = None
    # How often the job had shut its source down when the snapshot was made, and the source's last start: of one that was off.
    downs: int = 0
    last_start: str | None = None
    # Of its snapshot only the change ids are left at the source since then.
    released_at: datetime | None = None
    # How often its snapshot was gone, and another taken. None: it is on volumes that nothing of the pass was written to.
    retakes: int | None = None
    # It reads whole disks: their change tracking was lost.
    whole: bool = False


class JobMemory(Remembered):
    """Of the job, one row."""

    kind: ClassVar[str] = "job"

    # A passing trouble is being shown.
    told: Told | None = None
    # When the guest was asked to shut down, while nobody has seen it go off; for its last copy; and how often.
    shutting_down_at: datetime | None = None
    down_since: datetime | None = None
    downs: int = 0
    # How often change tracking was lost since the last pass that went well by it.
    cbt_resets: int = 0
    # Why the source's change tracking is not believed any more.
    distrusted: str | None = None
    # The delta that was begun because an operator asked a job that is held for its cut-over.
    last_delta: int | None = None
    hashed: Hashed | None = None
    # Whether a tool or our own readers import the export, and what its files were when that began.
    way: Literal["tool", "own"] | None = None
    source_files: str | None = None


class SourceMemory(Remembered):
    """What the source said last of its guest, before that was shut down (`moved.py`). A row of its own: it is long, and read
    once."""

    kind: ClassVar[str] = "source"

    facts: dict[str, str] = Field(default_factory=dict)


class CourseMemory(Remembered):
    """How fast the job copied. A row of its own: it is written every few seconds, by nobody that the job waits for."""

    kind: ClassVar[str] = "course"

    course: Course = Course()


def noting(before: R, **facts: object) -> R:
    """The same with these facts, each a field of it."""
    assert facts.keys() <= type(before).model_fields.keys(), facts
    return type(before).model_validate(dict(before) | facts)
