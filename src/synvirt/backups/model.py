"""The nouns of backups on the wire: repositories, jobs, runs, restore points."""

from enum import StrEnum
from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import Field, SecretStr, StringConstraints, computed_field, model_validator

from synvirt.backups.retention import Retention
from synvirt.backups.schedule import Schedule
from synvirt.model.access import Credentials, Endpoint, Fingerprint
from synvirt.model.job import Instant, Progress
from synvirt.model.submitter import Submitted
from synvirt.model.values import CALCULATED, WHOLE, Bytes, Model, Name, Received, Time
from synvirt.repository.garbage import Collected
from synvirt.repository.verify import Report
from synvirt.sizes import KIB, TIB

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
RepositoryKind = Literal["local", "nfs", "peer"]
# Like that of a migration: the most bytes that a worker reads in a second.
Bandwidth = Annotated[int, Field(ge=64 * KIB, le=TIB), WHOLE]
VmId = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Status(StrEnum):
    """`quiescing`: a guest that runs is about to be frozen; `snapshotting`: a snapshot of its disks is being made."""

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
UNENDED = tuple(status for status in Status if status not in ENDS)


class PeerRequest(Received):
    """A folder that another SynVirt offers: its `url` ends in /api/v1/backup/peer/NAME. `fingerprint_sha256`: of the
    certificate that it shows, and no other. `credentials`: `username` and `password` of the offer's account."""

    url: Endpoint
    fingerprint_sha256: Fingerprint
    credentials: Credentials


class BackupPeer(Model):
    """Where a repository of kind peer lies. `fingerprint_sha256`: of the peer's certificate. The password is never shown."""

    url: str
    fingerprint_sha256: str
    username: str


class BackupRepositoryRequest(Received):
    """Body of POST /repositories. `path`: a folder of this host; with kind nfs, on an NFS mount. With kind peer, `peer` says
    where. An empty one becomes a repository; to use one again, give its `recovery_key`, or a sealed copy of it, which
    `passphrase` opens."""

    name: Name
    kind: RepositoryKind
    path: Path | None = None
    peer: PeerRequest | None = None
    recovery_key: Annotated[str, StringConstraints(max_length=8192)] | None = None
    passphrase: SecretStr | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        wanted, other = ("peer", "path") if self.kind == "peer" else ("path", "peer")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a repository of kind {self.kind} has a {wanted}, and no {other}")
        return self


class PeerChange(Received):
    """What is new about a peer: its address, the certificate that it shows, the offer's account. Another `url` needs
    `credentials` too."""

    url: Endpoint | None = None
    fingerprint_sha256: Fingerprint | None = None
    credentials: Credentials | None = None


class BackupRepositoryChange(Received):
    """Body of PATCH /repositories/:id: the fields that are given replace the old ones. What lies at another `path`, or at a
    changed `peer`, must open with the repository's key. Its kind stays."""

    name: Name | None = None
    path: Path | None = None
    peer: PeerChange | None = None


class BackupRepository(Model):
    """`path` of a folder, `peer` of what another SynVirt offers."""

    id: UUID
    name: str
    kind: RepositoryKind
    path: str | None = None
    peer: BackupPeer | None = None
    encrypted: bool = True
    state: Annotated[Literal["ready", "unreachable"], CALCULATED] = "ready"
    problem: Annotated[str | None, CALCULATED] = None
    capacity_bytes: Annotated[Bytes | None, CALCULATED] = None
    used_bytes: Annotated[Bytes | None, CALCULATED] = None
    points_count: Annotated[int, CALCULATED] = 0
    created_at: Time

    @property
    def place(self) -> str:
        """As people call it."""
        return self.peer.url if self.peer is not None else self.path or ""


class RecoveryKey(Model):
    """Anyone who has it and the repository's folder can read the backups; without it and without this host no one can."""

    recovery_key: str


class SealedKeyRequest(Received):
    """Body of POST /repositories/:id/sealed-key: one of both. `bound_to`: this host, or its TPM, by systemd-creds."""

    passphrase: SecretStr | None = None
    bound_to: Literal["host", "tpm2"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.passphrase is None) == (self.bound_to is None):
            raise ValueError("a copy is sealed by a passphrase, or bound_to something: give exactly one of these")
        return self


class SealedKey(Model):
    """A line of text that opens the repository, with its passphrase, or on the host that it is bound to."""

    sealed_key: str


class BackupJobRequest(Received):
    """Body of POST /jobs. `vm_ids`: names or UUIDs of this host's domains. `schedule`: a cron expression of five fields, in
    UTC, for example `0 2 * * *`; without one nothing runs until it is asked for."""

    name: Name
    vm_ids: Annotated[tuple[VmId, ...], Field(min_length=1, max_length=1000)]
    repository_id: UUID
    quiesce: Literal["off", "try", "require"] = "try"
    retention: Retention = Retention()
    schedule: Schedule | None = None
    bandwidth_bps: Bandwidth | None = None


class BackupJobChange(Received):
    """Body of PATCH /jobs/:id. What is not sent stays as it is; `schedule` null: it has no schedule any more."""

    name: Name = ""
    vm_ids: Annotated[tuple[VmId, ...], Field(min_length=1, max_length=1000)] = ()
    quiesce: Literal["off", "try", "require"] = "try"
    retention: Retention = Retention()
    schedule: Schedule | None = None
    bandwidth_bps: Bandwidth | None = None


Trigger = Literal["asked", "schedule", "again"]


class BackupJob(Model):
    """A backup job. Its schedule is in UTC; `next_run_at` is null for a job that runs only when asked."""

    id: UUID
    name: str
    vm_ids: tuple[str, ...]
    repository_id: UUID
    quiesce: Literal["off", "try", "require"]
    retention: Retention
    schedule: Schedule | None = None
    bandwidth_bps: Bandwidth | None = None
    created_at: Time
    last_run_id: UUID | None = None
    last_success_at: Time | None = None
    next_run_at: Annotated[Time | None, CALCULATED] = None
    # The schedule's times up to this one are done.
    scheduled_to: Time | None = None


class Trouble(Model):
    """A warning or an error of a run: an E_ code, what happened, a hint; `vm_id`: the guest that it is about."""

    code: str
    message: str
    hint: str | None = None
    vm_id: str | None = None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


class DiskTaken(Model):
    """`read_bytes`: what was read of it. `changes_only`: the rest was known not to have changed."""

    target: str
    size_bytes: Bytes
    read_bytes: Bytes
    changes_only: bool


class GuestTaken(Model):
    """How a backup run read a guest. `way`: an atomic snapshot of zfs, a backup job with or without bitmaps of changes, or a
    guest that was shut off. `freeze_s`, and in milliseconds `freeze_ms`: how long its file systems were frozen."""

    vm_id: str
    vm_name: str
    way: Literal["zfs", "bitmap", "scan", "offline"]
    freeze_ms: int | None = None
    disks: tuple[DiskTaken, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def freeze_s(self) -> float | None:
        return _seconds(self.freeze_ms)


class RestoredDomain(Model):
    """The guest that a restore made."""

    name: str
    uuid: UUID


RunKind = Literal["backup", "restore", "verify", "boot_test", "collect"]


class BackupRun(Model):
    """A backup, a restore, a verification, a boot test or a collection of garbage, under way or ended. `trigger`: who began
    it; again: the schedule, since the service's end had cut the one before off. `submitted_by`: who asked for it; null: the
    service itself. `host`: the one that has it; null: it was begun by an earlier version. `attempt`: 2, if it was begun again.
    `stored_bytes`: what the repository grew by.
    `path`: where a restore put the disks; `domain`: the guest that it became; `instant`: how far that one is, where it
    was started at once. `error`: why it failed; while it is under way, what it tries again. `report`: what is wrong with the
    repository, `collected`: what was removed from it. `resumed_count`: how often the service ended meanwhile, and the run went
    on. `manifest_sha256`: of the restore point's manifest whose author the run checked, the one that it reads."""

    id: UUID
    kind: RunKind = "backup"
    trigger: Trigger = "asked"
    submitted_by: Submitted = None
    host: str | None = None
    attempt: int = 1
    job_id: UUID | None = None
    repository_id: UUID | None = None
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
    instant: Instant | None = None
    report: Report | None = None
    collected: Collected | None = None
    resumed_count: int = 0
    manifest_sha256: str | None = None


class RunUpdate(Model):
    """Data of the stream's `event: progress`."""

    id: UUID
    status: Status
    progress: Progress


class PointDisk(Model):
    """A disk of a restore point, by its target in the guest (`vda`)."""

    target: str
    size_bytes: Bytes


class BootTest(Model):
    """The last one. `sign`: what was seen of the guest that booted (agent, console, activity), `trouble` of one that did not;
    `boot_s`, and the same as `seconds` for clients of earlier versions: from its start until then. `screenshot`: whether there
    is one, at /restore-points/:id/screenshot."""

    at: Time
    result: Literal["booted", "failed"]
    seconds: float
    sign: str | None = None
    trouble: str | None = None
    screenshot: bool = False

    @computed_field  # type: ignore[prop-decorator]
    @property
    def boot_s(self) -> float:
        return self.seconds


PointState = Literal["ok", "unverified", "damaged"]


class RestorePoint(Model):
    """`stored_bytes`: what the repository grew by for it. `state`: as of the last verification. `protected`: nothing removes it
    until that is taken off it. `signed_by`: the fingerprint of the host's key that signed it, checked when this host first saw
    it; None: it is not signed, or was seen before points were."""

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
    repository_kind: RepositoryKind
    disks: tuple[PointDisk, ...]
    size_bytes: Bytes
    stored_bytes: Bytes
    state: PointState = "unverified"
    verified_at: Time | None = None
    protected: bool = False
    boot_test: BootTest | None = None
    signed_by: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def freeze_s(self) -> float | None:
        return _seconds(self.freeze_ms)


class RestorePointChange(Received):
    """Body of PATCH /restore-points/:id."""

    protected: bool


class PointFate(Model):
    """What retention does with a restore point: `kept_by` are the lines that keep it (keep_daily …; all: no line is set;
    newest: it is the last one left; protected), none for one that is removed."""

    restore_point_id: UUID
    vm_id: str
    vm_name: str
    created_at: Time
    kept_by: tuple[str, ...]
    removed: bool


class CollectRequest(Model):
    """What a collection was asked for. `dry_run`: to say what it would do, and do nothing."""

    dry_run: bool
    bandwidth_bps: Bandwidth | None = None


class RestoreRequest(Received):
    """Body of POST /restore-points/:id/restore.

    export: files in a new folder `name` (by default the id of the restore) of {data_dir}/exports, or of the folder `path`.
    new_domain: a guest next to the others, called `name` (by default as it was); `start` it when it is restored.
    in_place: the guest that the point is of, which must be shut off. `disks`: targets; all where it is not given.
    `instant`, with `start` alone: the new guest starts at once from the point, and is copied while it runs."""

    target: Literal["export", "new_domain", "in_place"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    path: Path | None = None
    format: Literal["raw", "qcow2"] = "raw"
    start: bool = False
    instant: bool = False
    bandwidth_bps: Bandwidth | None = None
    disks: Annotated[tuple[Name, ...], Field(max_length=4096)] = ()
