"""The nouns of backups on the wire: repositories, jobs, runs, restore points."""

from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, StringConstraints

from synvirt.backups.garbage import Retention
from synvirt.model import Bytes, Model, Name, Progress, Received, Time

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
VmId = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Status(StrEnum):
    """`quiescing` and `snapshotting` belong to guests that run, which are not backed up yet."""

    QUEUED = "queued"
    PREPARING = "preparing"
    QUIESCING = "quiescing"
    SNAPSHOTTING = "snapshotting"
    TRANSFERRING = "transferring"
    COMMITTING = "committing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})


class BackupRepositoryRequest(Received):
    """Body of POST /repositories. `path`: a folder of this host; with kind nfs something must be mounted there. An empty one
    becomes a repository; to use one again, give its `recovery_key`."""

    name: Name
    kind: Literal["local", "nfs"]
    path: Path
    recovery_key: Annotated[str, StringConstraints(max_length=200)] | None = None


class BackupRepository(Model):
    id: UUID
    name: str
    kind: Literal["local", "nfs"]
    path: str
    encrypted: bool = True
    state: Literal["ready", "unreachable"] = "ready"
    problem: str | None = None
    capacity_bytes: Bytes | None = None
    used_bytes: Bytes | None = None
    points_count: int = 0
    created_at: Time


class RecoveryKey(Model):
    """Who has it and the repository's folder has the backups; who loses it and this host has none."""

    recovery_key: str


class BackupJobRequest(Received):
    """Body of POST /jobs. `vm_ids`: names or UUIDs of this host's domains."""

    name: Name
    vm_ids: Annotated[tuple[VmId, ...], Field(min_length=1, max_length=1000)]
    repository_id: UUID
    quiesce: Literal["off", "try", "require"] = "try"
    retention: Retention = Retention()


class BackupJob(Model):
    id: UUID
    name: str
    vm_ids: tuple[str, ...]
    repository_id: UUID
    quiesce: Literal["off", "try", "require"]
    retention: Retention
    created_at: Time
    last_run_id: UUID | None = None


class Trouble(Model):
    code: str
    message: str
    hint: str | None = None
    vm_id: str | None = None


class DiskTaken(Model):
    """`read_bytes`: what was read of it. `changes_only`: the rest was known not to have changed."""

    target: str
    size_bytes: Bytes
    read_bytes: Bytes
    changes_only: bool


class GuestTaken(Model):
    """How a backup run read a guest. `way`: an atomic snapshot of zfs, a backup job with or without bitmaps of changes, or a
    guest that was shut off. `freeze_ms`: how long its file systems stood still."""

    vm_id: str
    vm_name: str
    way: Literal["zfs", "bitmap", "scan", "offline"]
    freeze_ms: int | None = None
    disks: tuple[DiskTaken, ...]


class RestoredDomain(Model):
    name: str
    uuid: UUID


class BackupRun(Model):
    """A backup, a restore, a verification or a boot test, under way or ended. `stored_bytes`: what the repository grew by.
    `path`: where a restore put the disks; `domain`: the guest that it became."""

    id: UUID
    kind: Literal["backup", "restore", "verify", "boot_test"] = "backup"
    job_id: UUID | None = None
    status: Status = Status.QUEUED
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None
    progress: Progress = Progress()
    stored_bytes: Bytes = 0
    restore_point_ids: tuple[UUID, ...] = ()
    guests: tuple[GuestTaken, ...] = ()
    warnings: tuple[Trouble, ...] = ()
    error: Trouble | None = None
    path: str | None = None
    domain: RestoredDomain | None = None


class RunUpdate(Model):
    """Data of the stream's `event: progress`."""

    id: UUID
    status: Status
    progress: Progress


class PointDisk(Model):
    target: str
    size_bytes: Bytes


class BootTest(Model):
    """The last one. `sign`: what was seen of the guest that booted (agent, console, activity), `trouble` of one that did not;
    `seconds`: from its start until then. `screenshot`: whether there is one, at /restore-points/:id/screenshot."""

    at: Time
    result: Literal["booted", "failed"]
    seconds: float
    sign: str | None = None
    trouble: str | None = None
    screenshot: bool = False


class RestorePoint(Model):
    """`stored_bytes`: what the repository grew by for it. `state`: as of the last verification."""

    id: UUID
    vm_id: str
    vm_name: str
    job_id: UUID
    run_id: UUID
    created_at: Time
    quiesced: bool
    freeze_ms: int | None = None
    consistency: Literal["application", "filesystem", "crash", "offline"]
    repository_id: UUID
    repository_kind: Literal["local", "nfs"]
    disks: tuple[PointDisk, ...]
    size_bytes: Bytes
    stored_bytes: Bytes
    state: Literal["ok", "unverified", "damaged"] = "unverified"
    verified_at: Time | None = None
    boot_test: BootTest | None = None


class RestoreRequest(Received):
    """Body of POST /restore-points/:id/restore.

    export: files in a new folder `name` (by default the id of the restore) of {data_dir}/exports, or of the folder `path`.
    new_domain: a guest beside the others, called `name` (by default as it was); `start` it when it is restored.
    in_place: the guest that the point is of, which must be shut off. `disks`: targets; all where it is not given."""

    target: Literal["export", "new_domain", "in_place"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    path: Path | None = None
    format: Literal["raw", "qcow2"] = "raw"
    start: bool = False
    disks: Annotated[tuple[Name, ...], Field(max_length=4096)] = ()
