"""A migration as the API answers it: its progress, passes, forecasts, domain, and visits of states."""

from typing import Literal
from uuid import UUID

from synvirt.model.kinds import ENDS, Mode, State
from synvirt.model.machine import DiskBus, VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.problems import Problem
from synvirt.model.rehearsal import Sameness
from synvirt.model.repair import Repair
from synvirt.model.values import Bytes, Model, Time


class Progress(Model):
    """`bytes_total` is what will really be read, where that is known. Zeros that need no reading count as done."""

    bytes_total: Bytes = 0
    bytes_done: Bytes = 0
    bytes_zero: Bytes = 0
    rate_bps: float = 0.0
    eta_s: float | None = None


class DiskProgress(Model):
    """How far the copy of one disk is, in bytes. `bytes_zero`: of those done, not copied since they are zeros. `volume`: its
    name at the destination."""

    key: str
    label: str
    state: Literal["waiting", "copying", "copied", "skipped"] = "waiting"
    bytes_total: Bytes = 0
    bytes_done: Bytes = 0
    bytes_zero: Bytes = 0
    volume: str | None = None


class Pass(Model):
    """`seconds` are those spent copying: what passes while the service is down does not count. `snapshot_at`: the moment of the
    source that it copied. `whole`: a delta that compared whole disks, since what had changed was not known for sure.
    `bytes_checked` of what should not have changed were compared, beside `bytes`; all of it, where it is to `verify`.
    `would_see`: had the source lost this share of the blocks of a disk that it called unchanged, or more, the comparison would
    have seen it, with the plan's `confidence`; null where nothing was compared."""

    number: int
    kind: Literal["full", "delta", "final"]
    bytes: Bytes = 0
    seconds: float = 0.0
    snapshot_at: Time | None = None
    whole: bool = False
    verify: bool = False
    bytes_checked: Bytes = 0
    would_see: float | None = None
    finished_at: Time | None = None


class Forecast(Model):
    """What a warm job expects, from its passes so far: of the cut-over, if it began at `at`. `expected_downtime_s` counts the
    copying, not the guest's own shutting down and booting. It does not converge while the guest changes more than is copied."""

    change_rate_bps: float
    throughput_bps: float
    expected_delta_bytes: Bytes
    expected_downtime_s: float
    converges: bool
    at: Time


OutagePartName = Literal["shutdown", "last copy", "conversion", "boot"]


class OutagePart(Model):
    """`measured`: of how many runs here; of none, it is a guess."""

    name: OutagePartName
    p50_s: float
    p95_s: float
    measured: int


class OutageForecast(Model):
    """How long the guest would be away, if its cut-over began at `at`. The last one stands when it does, for `downtime_s` to be
    compared with. `budget_s`: the plan's."""

    p50_s: float
    p95_s: float
    budget_s: float | None = None
    parts: tuple[OutagePart, ...] = ()
    at: Time


class Receipt(Model):
    """Of a job that completed: its place in the chain of its host's receipts, and its statement's SHA-256."""

    sequence: int
    job_id: UUID
    sha256: str
    made_at: Time


class Difference(Model):
    """What the domain here has otherwise than its source, and why."""

    what: str
    source: str
    here: str
    why: str


class Domain(Model):
    """The guest's domain on this host: its libvirt XML, and how it differs from the source."""

    name: str
    uuid: str
    xml: str
    differences: tuple[Difference, ...] = ()


class Moved(Model):
    """The guest here against its source, after its first boot: so many facts are the `same`, and those that `differ`, what is
    wrong first."""

    at: Time
    same: int
    differ: tuple[Sameness, ...] = ()


class BootAttempt(Model):
    """A rung of the ladder: the guest was started with its disks on this bus. `sign` of life, or `trouble`; neither yet: it is
    being tried."""

    disk_bus: DiskBus
    began_at: Time
    ended_at: Time | None = None
    sign: str | None = None
    trouble: str | None = None


InstantState = Literal["preparing", "running", "waiting", "moving", "done"]


class Instant(Model):
    """Of a guest that was started before its copy is whole. `preparing` its layers; it is `running` over them, or `waiting` for
    a source that cannot be read now; `moving` onto its volumes; `done`: it is on them. From `started_at` on it may have
    written, and a cancel loses what it wrote."""

    state: InstantState
    started_at: Time | None = None


MessageKind = Literal["message", "info", "warning", "error"]


class ConversionMessage(Model):
    """A line that the conversion tool printed."""

    at: Time
    kind: MessageKind
    text: str


class Conversion(Model):
    """What the tool that put drivers into the guest said, in its own words. Not finished: it runs, or it failed."""

    tool: str
    started_at: Time
    finished_at: Time | None = None
    messages: tuple[ConversionMessage, ...] = ()


class StateVisit(Model):
    """When the job entered a state: its history is the list of these."""

    state: State
    at: Time


class Migration(Model):
    """A job, as the store keeps it and as the API answers it."""

    id: UUID
    name: str
    plan: MigrationPlan
    state: State = State.QUEUED
    mode_effective: Mode
    last_error: Problem | None = None
    progress: Progress = Progress()
    disks: tuple[DiskProgress, ...] = ()
    passes: tuple[Pass, ...] = ()
    # Where the source was found to call unchanged what had changed: whole disks are compared since then.
    distrusted: str | None = None
    forecast: Forecast | None = None
    outage: OutageForecast | None = None
    # From the source's shutting down to the first sign of life here.
    downtime_s: float | None = None
    # Where its volumes are, from the moment that they have names: the host's default may change meanwhile.
    destination: str | None = None
    manifest: VmManifest | None = None
    domain: Domain | None = None
    history: tuple[StateVisit, ...] = ()
    conversion: Conversion | None = None
    boot_sign: str | None = None
    boot_attempts: tuple[BootAttempt, ...] = ()
    moved: Moved | None = None
    instant: Instant | None = None
    receipt: Receipt | None = None
    # It moves nothing: it compares the volumes of another job with that one's receipt.
    repair: Repair | None = None
    # A failed job whose copy is whole may be taken up by another job: that one's id, and the first one's.
    retried_by: UUID | None = None
    retry_of: UUID | None = None
    # A job of a lost host that another host started over: that one's id, and the first one's.
    restarted_by: UUID | None = None
    restart_of: UUID | None = None
    # The account that submitted it, as the audit trail names it.
    submitted_by: str | None = None
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    @property
    def held(self) -> bool:
        """What changes is copied again and again, until an operator asks for the cut-over."""
        by_hand = self.plan.source.Live is not None and self.plan.warm.cutover == "manual"
        return by_hand and self.mode_effective == Mode.WARM and self.state in (State.COPYING_FULL, State.DELTA_SYNCING)


class ProgressUpdate(Model):
    """Data of the stream's `event: progress`. `disks`: the rows of its disks as they are now, each by its `key`; empty, where
    those of the Migration still hold."""

    id: UUID
    state: State
    progress: Progress
    disks: tuple[DiskProgress, ...] = ()
