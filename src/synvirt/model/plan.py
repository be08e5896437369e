"""What a caller asks for: the plan of a migration, and the bodies that carry one."""

from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from synvirt.model.access import ChosenVm, RemoteFileRequest
from synvirt.model.kinds import LiveKind, Mode, OfflineKind
from synvirt.model.machine import DiskBus
from synvirt.model.times import Schedule, SyncSchedule
from synvirt.model.values import WHOLE, ChosenId, Name, Received
from synvirt.sizes import KIB, MIB, TIB


def _one_key(schema: dict[str, Any]) -> None:
    """Says in JSON Schema that exactly one field of the model is given."""
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
    """A VM of a registered source, by the id that the source's list gives it."""

    kind: Literal["live_vm"]
    source_id: UUID
    vm_id: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class HostPathRef(Received):
    """A file or folder in the import root. `vm`: which one, where it holds several."""

    kind: Literal["offline_host_path"]
    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    vm: ChosenVm = None


class UploadRef(Received):
    """An upload. `vm`: which one, where it holds several."""

    kind: Literal["upload"]
    upload_id: UUID
    vm: ChosenVm = None


class RemoteUrlRef(RemoteFileRequest):
    """A file at a URL, with the credentials for it."""

    kind: Literal["remote_url"]


SourceRef = Annotated[LiveVmRef | HostPathRef | UploadRef | RemoteUrlRef, Field(discriminator="kind")]


class NetworkMap(Received):
    """A network of the source, and the network of this host that its cards get."""

    source: str
    target: str


DestinationName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class Target(Received):
    """How the domain is to differ from its source. `None` keeps what the source has."""

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


class Warm(Received):
    """The delta loop's settings. It converges when a pass reads at most `delta_threshold_bytes`. `verify`: how the job checks
    what the source calls unchanged: `sample`, by samples in each pass; `full`, by reading all of it once while the guest still
    runs; `auto`, the same where the pause between two deltas or the outage budget has time for it. `confidence`: of a sample.
    `untracked`: what to do if the source cannot list the guest's changes: shut it down and copy it cold, or fail. `schedule`:
    with cutover manual, when deltas begin, instead of every `interval_s` or as fast as the guest changes. `window_id`: a window
    of the service, which lets a held job cut over in place of its operator, and never outside of it. So its `cutover` is manual
    and its `untracked` fail, whatever was sent: a cold copy has no forecast that could fit into a window."""

    window_id: ChosenId | None = None
    max_passes: Annotated[int, Field(ge=1, le=1000), WHOLE] = 10
    delta_threshold_bytes: Annotated[int, Field(ge=0, le=64 * TIB), WHOLE] = 256 * MIB
    interval_s: Annotated[float, Field(ge=0, le=7 * 86400)] = 0
    cutover: Annotated[Literal["auto", "manual"], Field(validate_default=True)] = "auto"
    verify: Literal["auto", "sample", "full"] = "auto"
    confidence: Annotated[float, Field(ge=0.5, le=0.9999)] = 0.95
    untracked: Annotated[Literal["cold", "fail"], Field(validate_default=True)] = "cold"
    schedule: SyncSchedule | None = None

    @field_validator("cutover", "untracked")
    @classmethod
    def _held_for_its_window(cls, value: str, info: ValidationInfo) -> str:
        """A version that knows no windows holds such a job, too, and does not cut it over at any time."""
        if info.data.get("window_id") is None:
            return value
        return "manual" if info.field_name == "cutover" else "fail"

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.schedule is not None and (self.cutover != "manual" or self.interval_s):
            raise ValueError("schedule is for cutover manual, and without interval_s: it says when deltas begin")
        return self


class Limits(Received):
    """`bandwidth_bps`: the most bytes per second that the copy may read; null: no limit."""

    bandwidth_bps: Annotated[int, Field(ge=64 * KIB, le=TIB), WHOLE] | None = None


def _matching_source(schema: dict[str, Any]) -> None:
    """Says in JSON Schema what `_source_fits_its_reference` checks."""
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
    """What a migration is to do. `source` and `source_ref` say which VM; every other field has a default."""

    model_config = ConfigDict(json_schema_extra=_matching_source)

    source: PlanSource
    source_ref: SourceRef
    mode: Mode
    name: Name | None = None
    target: Target = Target()
    skip_disks: tuple[str, ...] = ()
    # Ids of Critical concerns that the operator has read and accepts.
    waive_concerns: tuple[str, ...] = ()
    warm: Warm = Warm()
    limits: Limits = Limits()
    # Whether virtio drivers are installed in the guest: `auto` for one that cannot start without them, as Windows; `always` for
    # every Linux too.
    conversion: Literal["auto", "always", "never"] = "auto"
    # How the guest of a Live plan is shut down for its last copy: `polite` asks it, and powers it off after shutdown_timeout_s;
    # `hold` asks it and waits, as it may be installing updates; `force` does not ask.
    shutdown: Shutdown = "polite"
    # How long this guest may take to shut down: a database takes longer than a proxy. Null: as its source's options say.
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] | None = None
    # How long the outage of a warm job may be: the guest is shut down only once the forecast's p95 fits. Null: no limit.
    outage_budget_s: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    # If the cut-over takes longer than that: it goes on; or, as long as the guest has not run here, the source is powered on
    # again and the copy is kept.
    on_overrun: OnOverrun = "go_on"
    # If the host of the job's volumes is lost before the cut-over: the job waits for that host, or another host begins again.
    # Null: as that host's settings say.
    on_host_lost: OnHostLost | None = None
    schedule: Schedule = Schedule()
    # Start the guest of an Offline plan at once, on its source, and copy it while it runs (docs/instant.md).
    instant: bool = False

    @model_validator(mode="after")
    def _source_fits_its_reference(self) -> Self:
        if (self.source.Live is not None) != (self.source_ref.kind == "live_vm"):
            raise ValueError(
                "a Live source takes source_ref.kind live_vm; an Offline source takes offline_host_path, upload or remote_url"
            )
        if self.outage_budget_s is not None and (self.source.Live is None or self.mode is not Mode.WARM):
            raise ValueError("outage_budget_s is for mode Warm of a Live source: else the guest is off for the whole copy")
        if self.warm.window_id is not None and (self.source.Live is None or self.mode is not Mode.WARM):
            raise ValueError("warm.window_id is for mode Warm of a Live source: only such a job has a cut-over to wait for")
        if self.on_overrun == "roll_back" and self.outage_budget_s is None:
            raise ValueError("on_overrun roll_back needs outage_budget_s: without it no outage is too long")
        if self.schedule.interval_s is not None:
            if self.mode is not Mode.WARM or self.warm.cutover != "manual":
                raise ValueError("schedule.interval_s is for mode Warm with warm.cutover manual: only such jobs are held")
            if self.warm.schedule is not None or self.warm.interval_s:
                raise ValueError("schedule.interval_s, warm.schedule and warm.interval_s mean the same: give one of them")
        return self


class RetryRequest(Received):
    """Changes to a failed job's plan: a JSON merge patch (RFC 7396); null sets a field back to its default. What took effect
    already cannot be changed."""

    plan: dict[str, Any] = Field(default_factory=dict)


class PlanEnvelope(Received):
    """Body of POST /migrations."""

    plan: MigrationPlan
