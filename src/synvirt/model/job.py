"""A migration as the API answers it: its progress, passes, forecasts, domain, and visits of states."""

from typing import Literal
from uuid import UUID

from synvirt.errors import OutageTooLong
from synvirt.model.kinds import ENDS, Mode, State
from synvirt.model.machine import DiskBus, VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.problems import Problem
from synvirt.model.rehearsal import Sameness
from synvirt.model.repair import Repair
from synvirt.model.submitter import Submitted
from synvirt.model.values import Bytes, Model, Time, now


class Progress(Model):
    """`bytes_total` is what will really be read, where that is known, and `bytes_done` how much of it was. `bytes_zero` was not
    written because it is zeros: those that were read, and those that needed no reading, which are in neither of the others."""

    bytes_total: Bytes = 0
    bytes_done: Bytes = 0
    bytes_zero: Bytes = 0
    rate_bps: float = 0.0
    eta_s: float | None = None

    def stopped(self) -> "Progress":
        """The same of a job that copies nothing now: without a rate."""
        return self.model_copy(update={"rate_bps": 0.0, "eta_s": None})


class DiskProgress(Model):
    """How far the copy of one disk is, in bytes, counted as in Progress. `copying` in a job that has ended: there it stopped.
    `volume`: its name at the destination."""

    key: str
    label: str
    state: Literal["waiting", "copying", "copied", "skipped"] = "waiting"
    bytes_total: Bytes = 0
    bytes_done: Bytes = 0
    bytes_zero: Bytes = 0
    volume: str | None = None


class Pass(Model):
    """`seconds`: the time spent copying, without the time in which the service was down. `snapshot_at`: the moment of the
    source that it copied. `whole`: a delta that compared whole disks, because it was not certain what had changed.
    `bytes_checked`: bytes of unchanged blocks that were compared besides `bytes`; with `verify`, all of them. `would_see`: if
    the source had missed changes in this share of a disk's unchanged blocks or more, the comparison would have seen it, with
    the plan's `confidence`; null where nothing was compared."""

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
    """What a warm job expects of a cut-over that begins at `at`, from its passes so far. `expected_downtime_s` counts the
    copying, not the guest's shutdown and boot. It does not converge while the guest changes faster than its changes are
    copied."""

    change_rate_bps: float
    throughput_bps: float
    expected_delta_bytes: Bytes
    expected_downtime_s: float
    converges: bool
    at: Time


OutagePartName = Literal["shutdown", "last copy", "conversion", "boot"]


class OutagePart(Model):
    """`measured`: the number of runs here that it is taken from; with 0 it is a guess."""

    name: OutagePartName
    p50_s: float
    p95_s: float
    measured: int


class OutageForecast(Model):
    """How long the outage would be if the cut-over began at `at`. The last forecast before the cut-over stays, to be compared
    with `downtime_s`. `budget_s`: the plan's."""

    p50_s: float
    p95_s: float
    budget_s: float | None = None
    parts: tuple[OutagePart, ...] = ()
    at: Time


class Receipt(Model):
    """The receipt of a completed job: its place in the chain of its host's receipts, and its statement's SHA-256."""

    sequence: int
    job_id: UUID
    sha256: str
    made_at: Time


class Difference(Model):
    """A difference between the domain here and its source, and the reason."""

    what: str
    source: str
    here: str
    why: str


class Domain(Model):
    """The guest's domain on this host: its libvirt XML, and how it differs from the source. A failed or cancelled job whose
    domain was removed has none."""

    name: str
    uuid: str
    xml: str
    differences: tuple[Difference, ...] = ()


class Moved(Model):
    """The moved guest compared with its source, after its first boot: how many facts are the `same`, and those that `differ`;
    wrong ones come first."""

    at: Time
    same: int
    differ: tuple[Sameness, ...] = ()


class BootAttempt(Model):
    """An attempt to boot the guest with its disks on this bus. `sign`: of life; `trouble`: why it failed. With neither it is
    still being tried."""

    disk_bus: DiskBus
    began_at: Time
    ended_at: Time | None = None
    sign: str | None = None
    trouble: str | None = None


InstantState = Literal["preparing", "running", "waiting", "moving", "done"]


class Instant(Model):
    """The instant start of a guest, before its copy is complete. `preparing`: its layers are made; `running`: the guest runs on
    them; `waiting`: it cannot read its source, or write, now; `moving`: the guest moves onto its volumes; `done`: it is on
    them. From `started_at` on it may have written, and a cancel loses what it wrote."""

    state: InstantState
    started_at: Time | None = None


MessageKind = Literal["message", "info", "warning", "error"]


class ConversionMessage(Model):
    """A line that the conversion tool printed."""

    at: Time
    kind: MessageKind
    text: str


class Conversion(Model):
    """The run of the tool that installs drivers in the guest, with its own messages. Not finished: it runs, or it failed."""

    tool: str
    started_at: Time
    finished_at: Time | None = None
    messages: tuple[ConversionMessage, ...] = ()


# What a held job waits for: its `window`; a `request` to cut over; or, once there was one, the end of its present `pass`, an
# outage within its `budget`, or a `slot` for its next pass.
HeldFor = Literal["window", "request", "pass", "budget", "slot"]


class StateVisit(Model):
    """A state of the job's history, and when the job entered it."""

    state: State
    at: Time


class CutoverRequest(Model):
    """A request to cut over, `at` which time it was made. `until`: it expires then if the cut-over has not begun, because a
    window closes; null: it does not expire."""

    at: Time
    until: Time | None = None


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
    # Why whole disks are compared: the source called changed blocks unchanged.
    distrusted: str | None = None
    # The newest request of an operator, or of a wave, to a job with `warm.cutover` manual.
    cutover_request: CutoverRequest | None = None
    forecast: Forecast | None = None
    outage: OutageForecast | None = None
    # Seconds from the source's shutdown to the guest's first sign of life here.
    downtime_s: float | None = None
    # The destination of its volumes. It is set when they get their names, as the host's default may change later.
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
    # A failed job may be retried by another job, which takes over its volumes: that one's id, and the first one's.
    retried_by: UUID | None = None
    retry_of: UUID | None = None
    # A job of a lost host that another host started over: that one's id, and the first one's.
    restarted_by: UUID | None = None
    restart_of: UUID | None = None
    # 1 for a new plan; one more for each retry of it, and each time another host started it over.
    attempt: int = 1
    submitted_by: Submitted = None
    # The id of the host that has it, as /hosts lists it. Null: the job is of an earlier version.
    host: str | None = None
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    def disk_words(self, disk: DiskProgress) -> str:
        """The state of a disk for people."""
        return "stopped" if self.ended and disk.state == "copying" else disk.state

    @property
    def held(self) -> bool:
        """Whether the job copies deltas again and again until an operator asks for the cut-over."""
        by_hand = self.plan.source.Live is not None and self.plan.warm.cutover == "manual"
        return by_hand and self.mode_effective == Mode.WARM and self.state in (State.COPYING_FULL, State.DELTA_SYNCING)

    @property
    def asked_to_cut_over(self) -> bool:
        """Whether there is a request to cut over that has not expired."""
        asked = self.cutover_request
        return asked is not None and (asked.until is None or asked.until > now())

    @property
    def held_for(self) -> HeldFor:
        """What a held job waits for until it cuts over."""
        if self.plan.warm.window_id is not None:
            return "window"
        if not self.asked_to_cut_over:
            return "request"
        if self.passes and self.passes[-1].finished_at is None:
            return "pass"
        return "budget" if self.last_error is not None and self.last_error.code == OutageTooLong.code else "slot"


class ProgressUpdate(Model):
    """Data of the stream's `event: progress`. `disks`: its disks as they are now, each by its `key`; empty, where those of the
    Migration are still right."""

    id: UUID
    state: State
    progress: Progress
    disks: tuple[DiskProgress, ...] = ()
