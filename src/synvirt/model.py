"""The nouns on the wire and inside: one frozen pydantic model each, no I/O.

Units are in the names: `_bytes`, `_bps` (bytes per second), `_s` (seconds). Times are UTC. Unknown fields are an error in
what a caller sends (`Received`), and never appear in what we answer.
"""

from collections.abc import Collection
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    StringConstraints,
    model_validator,
)

from synvirt import sizes

KIB, MIB, GIB, TIB = sizes.KIB, sizes.MIB, sizes.GIB, sizes.TIB


def now() -> datetime:
    return datetime.now(UTC)


def _rfc3339(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 4.0 is the integer 4, for a reader that otherwise takes no float for an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Time = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str, when_used="json")]
Bytes = Annotated[int, Field(ge=0)]
# Names end in file names, zfs datasets and XML: 255 is the file system's limit; no control characters.
Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Model(BaseModel):
    """A value: frozen, compared by content."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Received(Model):
    """A value that a caller sends: an unknown field is an error, not silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ── kinds, modes, states (specification parts 1 to 3; spellings: part 2) ─────────────────────────────────────────────


class LiveKind(StrEnum):
    VIM_API = "vim_api"
    WMI_API = "wmi_api"
    PVE_API = "pve_api"
    LIBVIRT_REMOTE = "libvirt_remote"
    XEN_API = "xen_api"
    PRISM_API = "prism_api"


class OfflineKind(StrEnum):
    OVA_ARCHIVE = "ova_archive"
    OVF_FOLDER = "ovf_folder"
    VMX_FOLDER = "vmx_folder"
    VHDX = "vhdx"
    QCOW2 = "qcow2"
    VMDK = "vmdk"
    VMCX_EXPORT = "vmcx_export"
    VBOX_FOLDER = "vbox_folder"
    XVA_ARCHIVE = "xva_archive"


class Mode(StrEnum):
    WARM = "Warm"
    COLD = "Cold"


class State(StrEnum):
    QUEUED = "Queued"
    COPYING_FULL = "CopyingFull"
    DELTA_SYNCING = "DeltaSyncing"
    CUTTING_OVER = "CuttingOver"
    V2V_PROCESSING = "V2vProcessing"
    STARTING = "Starting"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


ENDS = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})

DiskBus = Literal["virtio", "scsi", "sata", "ide", "nvme"]


def letters(number: int) -> str:
    """0 is a, 25 is z, 26 is aa: as Linux names disks."""
    found = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        found = chr(ord("a") + letter) + found
    return found


# ── the VM as its source describes it ────────────────────────────────────────────────────────────────────────────────


class GuestOs(Model):
    family: Literal["windows", "linux", "other"] = "other"
    id: str = ""
    name: str = ""


class Disk(Model):
    """A disk of the source VM. `key` names it everywhere: never its place in a list."""

    key: str
    label: str
    capacity_bytes: Bytes
    used_bytes: Bytes | None = None
    format: str = "raw"
    bus: DiskBus = "scsi"
    controller: str = ""
    unit: int = 0
    boot_order: int | None = None
    source_path: str = ""
    cbt_enabled: bool = False
    # Why its changes cannot be tracked, or not be read; where there is no reason, they can.
    cbt_reason: str | None = None
    # By which of the platform's ways its bytes are read (vSphere: vddk, datastore, esxi or lease), where there are several.
    read_by: str | None = None


class Nic(Model):
    key: str
    mac: str | None = None
    model: str = ""
    network: str = ""
    connected: bool = True
    ip_addresses: tuple[str, ...] = ()


class Snapshot(Model):
    id: str
    name: str = ""
    created_at: Time | None = None


class Concern(Model):
    """What may go wrong with this VM, seen before anything is copied."""

    id: str
    category: Literal["Critical", "Warning", "Information"]
    label: str
    assessment: str
    remedy: str


class VmManifest(Model):
    vm_id: str
    name: str
    uuid: str | None = None
    # Which of its platform's hosts it is on; empty where the platform is one host, or does not say.
    host: str = ""
    power_state: Literal["on", "off", "suspended", "unknown"] = "off"
    firmware: Literal["bios", "uefi"] = "bios"
    secure_boot: bool = False
    tpm: bool = False
    cpu_count: int = 1
    cores_per_socket: int = 1
    memory_bytes: Bytes = GIB
    guest_os: GuestOs = GuestOs()
    cbt_available: bool = False
    cbt_reason: str | None = None
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    concerns: tuple[Concern, ...] = ()

    def cbt_reason_without(self, skipped: Collection[str]) -> str | None:
        """Why it cannot be copied warm when these disks are left out; None: it can. What is wrong with the whole VM is said of
        each of its disks, or of none and in `cbt_reason` alone."""
        if self.cbt_available:
            return None
        if all(disk.cbt_reason is None for disk in self.disks):
            return self.cbt_reason or "its changes are not tracked"
        reasons = [disk.cbt_reason for disk in self.disks if disk.cbt_reason is not None and disk.key not in skipped]
        return "; ".join(dict.fromkeys(reasons)) or None


# ── getting in elsewhere ─────────────────────────────────────────────────────────────────────────────────────────────


def _colons(value: str) -> str:
    """As browsers and `openssl x509 -fingerprint` show it, whether it came with colons or without."""
    digits = value.replace(":", "").upper()
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))


Fingerprint = Annotated[
    str, StringConstraints(pattern=r"^([0-9A-Fa-f]{2}:){31}[0-9A-Fa-f]{2}$|^[0-9A-Fa-f]{64}$"), AfterValidator(_colons)
]
Endpoint = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2048, pattern=r"^[^\x00-\x20\x7f]+$")
]
# Typed by hand, and typed again to find it.
SourceName = Annotated[Name, StringConstraints(strip_whitespace=True)]
# A private key is the longest secret; 32 fields are more than any platform has.
Credentials = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], Annotated[SecretStr, Field(max_length=65536)]],
    Field(max_length=32),
]


class SourceOptions(Received):
    """What every platform takes; one that takes more has a model of its own over this one.

    `fingerprint_sha256` pins the certificate that the platform must show, whoever signed it; without it, `verify_tls` asks for
    one that this host's authorities signed."""

    verify_tls: bool = True
    fingerprint_sha256: Fingerprint | None = None


class RemoteOptions(SourceOptions):
    """`region` and `endpoint` (https://minio.example:9000) are S3's; without an endpoint it is AWS."""

    region: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")] | None = None
    endpoint: Endpoint | None = None


# Of a file that holds several VMs: the name or the id of the one that is meant.
ChosenVm = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=255)] | None, Field(exclude_if=lambda value: value is None)
]


class RemoteFileRequest(Received):
    """Body of POST /remote-files/inspect: a file elsewhere, or a folder (the URL then ends with a slash).

    credentials: `username` and `password` of http and smb (and `domain`), `token` of http; `access_key_id`,
    `secret_access_key` and `session_token` of s3. What is secret in the URL itself (user:password@, a signed query) is kept as
    they are: sealed with the job, and in no answer."""

    url: Annotated[str, StringConstraints(max_length=8192, pattern=r"^(https?|s3|smb)://[^\x00-\x1f\x7f]+$")]
    credentials: Credentials = Field(default_factory=dict)
    options: RemoteOptions = RemoteOptions()
    vm: ChosenVm = None


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_key(schema: dict[str, Any]) -> None:
    """JSON Schema's words for a model of which exactly one field is given."""
    del schema["type"], schema["additionalProperties"]
    schema["oneOf"] = [
        {"type": "object", "properties": {name: field["anyOf"][0]}, "required": [name], "additionalProperties": False}
        for name, field in schema.pop("properties").items()
    ]


class PlanSource(Received):
    """Exactly one key: `{"Live": kind}` or `{"Offline": kind}`."""

    model_config = ConfigDict(json_schema_extra=_one_key)

    Live: LiveKind | None = Field(default=None, exclude_if=lambda value: value is None)
    Offline: OfflineKind | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.Live is None) == (self.Offline is None):
            raise ValueError("source has exactly one key, Live or Offline")
        return self


class LiveVmRef(Received):
    kind: Literal["live_vm"]
    source_id: UUID
    vm_id: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class HostPathRef(Received):
    kind: Literal["offline_host_path"]
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    vm: ChosenVm = None


class UploadRef(Received):
    kind: Literal["upload"]
    upload_id: UUID
    vm: ChosenVm = None


class RemoteUrlRef(RemoteFileRequest):
    kind: Literal["remote_url"]


SourceRef = Annotated[LiveVmRef | HostPathRef | UploadRef | RemoteUrlRef, Field(discriminator="kind")]


class NetworkMap(Received):
    source: str
    target: str


DestinationName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class Target(Received):
    """How the domain shall differ from its source. `None` keeps what the source has."""

    name: Name | None = None
    cpu_count: Annotated[int, Field(ge=1, le=1024), WHOLE] | None = None
    memory_bytes: Annotated[int, Field(ge=MIB, le=64 * TIB), WHOLE] | None = None
    start: bool = True
    network_map: tuple[NetworkMap, ...] = ()
    disk_bus: DiskBus | None = None
    # Which of the host's destinations its volumes go to; the settings name them.
    destination: DestinationName | None = None
    # keep: the source's UUID and MAC addresses, which no other domain here may have; new: its own, for a copy beside it.
    identity: Literal["keep", "new"] = "keep"


# ── local times ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _known_zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{value!r} is no time zone of the IANA database, like Europe/Berlin") from None
    return value


def _local(value: datetime) -> datetime:
    if value.tzinfo is not None:
        raise ValueError("this time is local to its time zone and has no offset, like 2026-11-28T22:00:00")
    return value


TimeZone = Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_known_zone)]
LocalTime = Annotated[datetime, AfterValidator(_local)]


def local_to_utc(value: datetime, timezone: str) -> datetime:
    """A local time that a change of clocks skips is moved past the gap; one that comes twice is its first (fold 0)."""
    return value.replace(tzinfo=ZoneInfo(timezone)).astimezone(UTC)


class SyncSchedule(Received):
    """When a job that is held copies what has changed: at `start`, local to `timezone`, and again by `rrule` (RFC 5545, section
    3.3.10, without RRULE:), at the same time of day."""

    timezone: TimeZone = "UTC"
    rrule: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    start: LocalTime


def _with_offset(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("this time has no offset; 2026-11-28T22:00:00Z and 2026-11-28T22:00:00+01:00 have one")
    return value


# A moment that a caller sends: without an offset nobody knows which it is, and it compares with no other.
Moment = Annotated[Time, AfterValidator(_with_offset)]


class Schedule(Received):
    """`start_at`: the job begins then, not before. `interval_s`: a job that is held copies what has changed each time so many
    seconds are over, counted from `start_at`."""

    start_at: Moment | None = None
    interval_s: Annotated[float, Field(ge=60, le=366 * 86400)] | None = None

    @model_validator(mode="after")
    def _counted_from_a_time(self) -> Self:
        if self.interval_s is not None and self.start_at is None:
            raise ValueError("schedule.interval_s is counted from schedule.start_at, which is missing")
        return self


class Warm(Received):
    """The delta loop's settings: it converges when a pass reads no more than `delta_threshold_bytes`. `verify`: how what the
    source calls unchanged is doubted; by a sample in each pass, or in full too, once, while the guest still runs. `untracked`:
    what becomes of a guest whose changes the source cannot tell: it is shut down and copied cold, or the job fails. `schedule`:
    with cutover manual, deltas begin by it, instead of each `interval_s` or as fast as the guest changes."""

    max_passes: Annotated[int, Field(ge=1, le=1000), WHOLE] = 10
    delta_threshold_bytes: Annotated[int, Field(ge=0, le=64 * TIB), WHOLE] = 256 * MIB
    interval_s: Annotated[float, Field(ge=0, le=7 * 86400)] = 0
    cutover: Literal["auto", "manual"] = "auto"
    verify: Literal["sample", "full"] = "sample"
    untracked: Literal["cold", "fail"] = "cold"
    schedule: SyncSchedule | None = None

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.schedule is not None and (self.cutover != "manual" or self.interval_s):
            raise ValueError("schedule is for cutover manual, and without interval_s: it says when deltas begin")
        return self


class Limits(Received):
    bandwidth_bps: Annotated[int, Field(ge=64 * KIB, le=TIB), WHOLE] | None = None


def _matching_source(schema: dict[str, Any]) -> None:
    """JSON Schema's words for `_source_fits_its_reference`."""
    mapping = schema["properties"]["source_ref"]["discriminator"]["mapping"]
    schema["oneOf"] = [
        {
            "properties": {
                "source": {"required": [key]},
                "source_ref": {"oneOf": [{"$ref": mapping[kind]} for kind in kinds]},
            }
        }
        for key, kinds in (("Live", ["live_vm"]), ("Offline", ["offline_host_path", "upload", "remote_url"]))
    ]


Shutdown = Literal["polite", "hold", "force"]
OnOverrun = Literal["go_on", "roll_back"]


OnHostLost = Literal["wait", "restart_elsewhere"]


class MigrationPlan(Received):
    model_config = ConfigDict(json_schema_extra=_matching_source)

    source: PlanSource
    source_ref: SourceRef
    mode: Mode
    name: Name | None = None
    target: Target = Target()
    skip_disks: tuple[str, ...] = ()
    # Ids of Critical concerns that the operator has read and takes upon himself.
    waive_concerns: tuple[str, ...] = ()
    warm: Warm = Warm()
    limits: Limits = Limits()
    # virtio drivers put into the guest: `auto` into Windows, which cannot start without; `always` into Linux too.
    conversion: Literal["auto", "always", "never"] = "auto"
    # How the guest of a Live plan is shut down for its last copy: `polite` asks it, and powers it off once shutdown_timeout_s
    # are over; `hold` asks it and waits, since it may be installing updates; `force` does not ask.
    shutdown: Shutdown = "polite"
    # How long this guest may take to go off by itself: a database takes longer than a proxy. Null: as its source says.
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] | None = None
    # How long the guest of a warm job may be away: it is shut down once the forecast's p95 fits, not before. Null: as it comes.
    outage_budget_s: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    # What becomes of a cut-over that takes longer than that all the same: it goes on, or, while the guest was not seen to run
    # here, the source is powered on again and the copy is kept.
    on_overrun: OnOverrun = "go_on"
    # What becomes of a job on disks of a host that is lost, before its cut-over: it waits for that host, or another host begins
    # anew. Null: as that host's settings say.
    on_host_lost: OnHostLost | None = None
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def _source_fits_its_reference(self) -> Self:
        if (self.source.Live is not None) != (self.source_ref.kind == "live_vm"):
            raise ValueError(
                "a Live source takes source_ref.kind live_vm; an Offline source takes offline_host_path, upload or remote_url"
            )
        if self.outage_budget_s is not None and (self.source.Live is None or self.mode is not Mode.WARM):
            raise ValueError("outage_budget_s is for mode Warm of a Live source: else the guest is away for the whole copy")
        if self.on_overrun == "roll_back" and self.outage_budget_s is None:
            raise ValueError("on_overrun roll_back needs outage_budget_s: nothing says when it is too long")
        if self.schedule.interval_s is not None:
            if self.mode is not Mode.WARM or self.warm.cutover != "manual":
                raise ValueError("schedule.interval_s is for mode Warm with warm.cutover manual: nothing else is held")
            if self.warm.schedule is not None or self.warm.interval_s:
                raise ValueError("schedule.interval_s, warm.schedule and warm.interval_s say one thing: one of them is enough")
        return self


# ── the job ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Problem(Model):
    """`last_error` of a job; with `fatal` false the job goes on."""

    code: str
    message: str
    hint: str | None = None
    fatal: bool = True
    at: Time
    state: State


class Progress(Model):
    """`bytes_total` is what will really be read, where that is known. Zeros that need no reading count as done."""

    bytes_total: Bytes = 0
    bytes_done: Bytes = 0
    bytes_zero: Bytes = 0
    rate_bps: float = 0.0
    eta_s: float | None = None


class DiskProgress(Model):
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
    `would_see`: had the source lost this share of the blocks that it called unchanged, or more, the comparison would have seen
    it with a confidence of 95 %; null where nothing was compared."""

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
    name: str
    uuid: str
    xml: str
    differences: tuple[Difference, ...] = ()


class BootAttempt(Model):
    """A rung of the ladder: the guest was started with its disks on this bus. `sign` of life, or `trouble`; neither yet: it is
    being tried."""

    disk_bus: DiskBus
    began_at: Time
    ended_at: Time | None = None
    sign: str | None = None
    trouble: str | None = None


MessageKind = Literal["message", "info", "warning", "error"]


class ConversionMessage(Model):
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
    receipt: Receipt | None = None
    # A failed job whose copy is whole may be taken up by another job: that one's id, and the first one's.
    retried_by: UUID | None = None
    retry_of: UUID | None = None
    # A job of a lost host that another host began anew: that one's id, and the first one's.
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


# ── sources: registered live platforms ───────────────────────────────────────────────────────────────────────────────


class SourceRequest(Received):
    """Body of POST /sources. Which credentials and options there are is the kind's to say: docs/platforms."""

    name: SourceName
    kind: LiveKind
    endpoint: Endpoint
    credentials: Credentials = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class SourceChange(Received):
    """Body of PATCH /sources/:id: what is given replaces what was; another `endpoint` needs its credentials with it."""

    name: SourceName | None = None
    endpoint: Endpoint | None = None
    credentials: Credentials | None = None
    options: dict[str, Any] | None = None


class SourceCheck(Model):
    """One thing that must be so for the source to serve. `hint`: what to do where it is not. `warning`: it serves without, and
    not as well."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None
    warning: bool = False
    # What a way of reading a disk brought, where the check measured one.
    bytes_per_s: float | None = None


class SourceTest(Model):
    """`latency_ms`: how long the platform took to take a connection, or to log in where it has no port."""

    ok: bool
    product: str | None = None
    version: str | None = None
    latency_ms: float | None = None
    checks: tuple[SourceCheck, ...] = ()
    at: Time


class Source(Model):
    """A registered live platform. Its credentials are sealed apart, and are in no answer.

    `rates`: bytes a second by way of reading, as the last deep test measured them; a shallow test leaves them.
    """

    id: UUID
    name: str
    kind: LiveKind
    endpoint: str
    options: dict[str, Any] = Field(default_factory=dict)
    created_at: Time
    last_test: SourceTest | None = None
    rates: dict[str, float] = Field(default_factory=dict)


# ── files: host files, uploads, what is in them ──────────────────────────────────────────────────────────────────────


class HostEntry(Model):
    """What lies in a folder of the import root. Links are shown as what they lead to; a folder has no size."""

    name: str
    path: str
    type: Literal["file", "directory"]
    size_bytes: Bytes | None
    modified_at: Time
    offline_kind: OfflineKind | None


class HostFolder(Model):
    """A page of a folder: folders first, then files, each by name. `parent` of the import root is null."""

    path: str
    parent: str | None
    entries: tuple[HostEntry, ...]
    next_cursor: str | None


class HostFileRequest(Received):
    """Body of POST /host-files/inspect."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    vm: ChosenVm = None


class UploadInspectRequest(Received):
    """Body of POST /uploads/:id/inspect, which may be left out."""

    vm: ChosenVm = None


class Inspection(Model):
    """What a file or folder is, and which VM is in it."""

    offline_kind: OfflineKind
    manifest: VmManifest


class Upload(Model):
    """An uploaded archive. `path` can be used as `offline_host_path`; from `expires_at` on it may be gone."""

    id: UUID
    filename: str
    size_bytes: Bytes
    sha256: str
    path: str
    created_at: Time
    expires_at: Time


class ProgressUpdate(Model):
    """Data of the stream's `event: progress`. `disks`: the rows of its disks as they are now, each by its `key`; empty, where
    those of the Migration still hold."""

    id: UUID
    state: State
    progress: Progress
    disks: tuple[DiskProgress, ...] = ()


class RetryRequest(Received):
    """What of a failed job's plan shall be otherwise: a JSON merge patch of it (RFC 7396), null taking a field back to its
    default. What took effect already cannot be changed."""

    plan: dict[str, Any] = Field(default_factory=dict)


class PlanEnvelope(Received):
    """Body of POST /migrations."""

    plan: MigrationPlan


class ProblemDetails(Model):
    """RFC 9457 `application/problem+json`, with the E_ code and a hint."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None


JsonObject = dict[str, Any]
