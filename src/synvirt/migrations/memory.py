"""What a migration remembers besides its document: a row for each pass, one for the job, one for its course.

Each has a version, as every stored document. A held job's rows are bounded: those of old passes are deleted
(`Store.fold_passes`).
"""

from collections.abc import Mapping
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


class Passing(Model):
    """The job's last problem, before a passing trouble was shown in its place. None: there was none."""

    before: Problem | None = None


class Hashed(Model):
    """The host that has hashed the volumes so far. Another host begins from the start."""

    host: str
    token: UUID


class PassMemory(Remembered):
    """What the job remembers of one pass."""

    kind: ClassVar[str] = "pass"

    # When the making of its snapshot began: from then on there may be one. None again, when that is gone.
    begun_at: datetime | None = None
    # Its snapshot, with the change ids that the next pass counts from; None while there is none.
    snapshot: SnapshotRef | None = None
    # The moment of the source that it copies.
    snapshot_at: datetime | None = None
    # For a snapshot of a source that was off: how often the job had shut it down by then, and the source's last start.
    downs: int = 0
    last_start: str | None = None
    # When its snapshot was released: since then only its change ids are left at the source.
    released_at: datetime | None = None
    # How often its snapshot was gone and another was taken. None: nothing of the pass has been written to the volumes before.
    retakes: int | None = None
    # It reads whole disks, as their change tracking was lost.
    whole: bool = False


class JobMemory(Remembered):
    """What the job remembers, one row."""

    kind: ClassVar[str] = "job"
    renamed: ClassVar[Mapping[str, str]] = {"told": "passing", "left_off": "power_given_up"}

    # Set while a passing trouble is shown.
    passing: Passing | None = None
    # When the guest was asked to shut down, until it is seen to be off; since when it is down for its last copy; and how often
    # the job has shut it down.
    shutting_down_at: datetime | None = None
    down_since: datetime | None = None
    downs: int = 0
    # The job failed, and its source was not powered on again within a day: that is not tried any more.
    power_given_up: bool = False
    # How often change tracking was lost since the last pass that succeeded with it.
    cbt_resets: int = 0
    # Why the source's change tracking is not trusted any more; None: it is.
    distrusted: str | None = None
    # The number of the delta that was begun because the operator of a held job asked for its cut-over.
    last_delta: int | None = None
    hashed: Hashed | None = None
    # Whether a tool or our own readers import the export, and what its files were when that began (`disks.noted_files`);
    # `source_files`: the same, as earlier versions wrote it.
    way: Literal["tool", "own"] | None = None
    files: tuple[str, ...] | None = None
    source_files: str | None = None
    # The files that the worker opened for each disk, as they were then.
    opened_files: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class SourceMemory(Remembered):
    """The facts of the guest at its source, before it was shut down (`moved.py`). They have their own row, as they are long and
    read once."""

    kind: ClassVar[str] = "source"

    facts: dict[str, str] = Field(default_factory=dict)


class CourseMemory(Remembered):
    """How fast the job copied. It has its own row, which is written every few seconds; the job does not wait for that."""

    kind: ClassVar[str] = "course"

    course: Course = Course()


def noting(before: R, **facts: object) -> R:
    """`before` with these fields changed."""
    assert facts.keys() <= type(before).model_fields.keys(), facts
    return type(before).model_validate(dict(before) | facts)
