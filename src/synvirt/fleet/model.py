"""The nouns of waves on the wire. What a caller sends is `Received`; what we answer is a `Model`."""

from enum import StrEnum
from typing import Annotated, Literal, Self, get_args
from uuid import UUID

from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.model.access import Endpoint
from synvirt.model.checks import Check
from synvirt.model.plan import DestinationName, MigrationPlan
from synvirt.model.submitter import Submitted
from synvirt.model.times import Moment
from synvirt.model.values import WHOLE, ChosenId, Model, Name, Received, Time
from synvirt.model.windows import Window
from synvirt.sizes import KIB, TIB

# An id within a wave.
MemberId = ChosenId
# Ten thousand VMs are twice the largest fleet that was asked for; their document has some 20 MiB.
MEMBERS_MAX = 10_000


class WaveState(StrEnum):
    """`draft`: nothing moves before `go`. `held`: nothing new begins; what copies goes on. `rolling_back`: members that were
    cut over are rolled back to their source."""

    DRAFT = "draft"
    RUNNING = "running"
    HELD = "held"
    ROLLING_BACK = "rolling_back"
    COMPLETED = "completed"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"


WAVE_ENDS = frozenset({WaveState.COMPLETED, WaveState.FAILED, WaveState.ROLLED_BACK, WaveState.CANCELLED})
GOING = frozenset({WaveState.RUNNING, WaveState.HELD})
UNDER_WAY = frozenset({*GOING, WaveState.ROLLING_BACK})
REMOVABLE = frozenset({WaveState.DRAFT, *WAVE_ENDS})


class MemberState(StrEnum):
    """`ready`: its copy is whole and kept fresh, and waits for its cut-over. `healthy`: seen booted and its checks passed."""

    WAITING = "waiting"
    SYNCING = "syncing"
    READY = "ready"
    CUTTING_OVER = "cutting_over"
    HEALTHY = "healthy"
    FAILED = "failed"
    SKIPPED = "skipped"
    ROLLED_BACK = "rolled_back"


MEMBER_ENDS = frozenset({MemberState.HEALTHY, MemberState.FAILED, MemberState.SKIPPED, MemberState.ROLLED_BACK})
ALL_STATES = frozenset(MemberState)
UNENDED = ALL_STATES - MEMBER_ENDS
UNBEGUN = frozenset({MemberState.WAITING, MemberState.READY})
BEFORE_CUT_OVER = frozenset({MemberState.SYNCING, *UNBEGUN})
# It has a job that has not ended.
RUNS = frozenset({MemberState.SYNCING, MemberState.READY, MemberState.CUTTING_OVER})
# Its source may have been shut down, or its guest runs here.
MOVED = frozenset({MemberState.CUTTING_OVER, MemberState.HEALTHY})


class Group(Received):
    """`together`: its members cut over in one window, or none does. `apart`: no two of them cut over at once, nor run on one
    host."""

    name: MemberId
    rule: Literal["together", "apart"] = "together"
    outage_budget_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None


class MemberRequest(Received):
    """One VM of a wave. `after`: ids of members, or names of groups, that are healthy before it cuts over. `priority`: lower
    first."""

    id: MemberId
    vm: Name
    plan: MigrationPlan
    after: Annotated[tuple[MemberId, ...], Field(max_length=1000)] = ()
    group: MemberId | None = None
    priority: Annotated[int, Field(ge=1, le=5), WHOLE] = 3
    window_id: MemberId | None = None
    outage_budget_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None
    # The names of the people who must approve its cut-over.
    approvers: Annotated[tuple[Name, ...], Field(max_length=16)] = ()
    checks: Annotated[tuple[Check, ...], Field(max_length=32)] = ()


class Approval(Model):
    """`approver`: a name of the member's `approvers`; `account`: who approved."""

    approver: str
    account: str
    at: Time


class Member(MemberRequest):
    """As answered. `waits_for`: a sentence that says what it waits for, null where it waits for nothing."""

    state: MemberState = MemberState.WAITING
    waits_for: str | None = None
    job_id: UUID | None = None
    # It is retried: the failed job whose volumes its next job uses; null, if that begins from the start.
    retry_of: UUID | None = None
    # Our host and its destination that take it, and the reason; null, if they are not chosen yet.
    host: str | None = None
    destination: str | None = None
    placed: str | None = None
    approvals: tuple[Approval, ...] = ()
    # By the forecast, and as it was.
    planned_at: Time | None = None
    cut_over_at: Time | None = None
    healthy_at: Time | None = None
    outage_s: float | None = None
    cause: str | None = None

    @property
    def is_back(self) -> bool:
        """Whether nothing of it is left to roll back. One that failed and then was skipped may have a guest that runs here."""
        return self.state is MemberState.ROLLED_BACK or (self.state is MemberState.SKIPPED and self.job_id is None)


class WaveLimits(Received):
    """How much at once: full copies, and by themselves cut-overs, per source host, per destination and in the whole wave; bytes
    a second of all its copies together."""

    per_source_host: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    per_destination: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = None
    wave: Annotated[int, Field(ge=1, le=10_000), WHOLE] | None = None
    bandwidth_bps: Annotated[int, Field(ge=64 * KIB, le=TIB), WHOLE] | None = None


class Canary(Received):
    """The first `count` members move alone; the others go on once those are healthy, or once they are approved."""

    count: Annotated[int, Field(ge=1, le=1000), WHOLE]
    gate: Literal["success", "approval"] = "success"


HookEvent = Literal[
    "wave_began",
    "wave_held",
    "wave_ended",
    "cutover_began",
    "cutover_ended",
    "member_failed",
    "approval_needed",
    "canary_waits",
]
_ALL_EVENTS: tuple[HookEvent, ...] = get_args(HookEvent)


class Hook(Received):
    """A webhook: POST to `url` of each event, signed with `secret` as Standard Webhooks 1.0.0 says it (HMAC-SHA256 of id, time
    and body); the path and the secret are never answered. Or `command`: one that the service's settings name. `required`:
    nothing new begins while one of its deliveries is owed, and one that is given up holds the wave."""

    url: Annotated[Endpoint, StringConstraints(pattern=r"^https?://[^/?#]")] | None = None
    secret: Annotated[SecretStr, Field(min_length=16, max_length=256)] | None = None
    command: DestinationName | None = None
    events: Annotated[tuple[HookEvent, ...], Field(min_length=1, max_length=len(_ALL_EVENTS))] = _ALL_EVENTS
    required: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.url is None) == (self.command is None) or (self.url is None) != (self.secret is None):
            raise ValueError("a webhook has a url and a secret, or a command")
        return self


class HookShown(Model):
    """`url`: its beginning alone, up to the path, which may be a secret too."""

    id: UUID
    url: str | None
    command: str | None
    events: tuple[HookEvent, ...]
    required: bool


class Delivery(Model):
    """Of an event to a webhook. `answer`: the result of its last attempt; `next_at`: when the next one is, while it is
    pending."""

    number: int
    hook_id: UUID
    event: HookEvent
    member: str | None
    state: Literal["pending", "delivered", "given_up"]
    attempts: int
    made_at: Time
    next_at: Time | None
    answer: str | None


class WaveForecast(Model):
    """From `simulate`: when it begins, when all is done with a chance of one half and of 95 %, and what delays it most."""

    starts_at: Time
    ends_p50: Time
    ends_p95: Time
    bottleneck: str
    made_at: Time


class WaveRequest(Received):
    """Body of POST /waves. Ids are unique; `after`, `group` and `window_id` name what is in this wave; no cycle."""

    name: Name
    members: Annotated[tuple[MemberRequest, ...], Field(max_length=MEMBERS_MAX)] = ()
    groups: Annotated[tuple[Group, ...], Field(max_length=1000)] = ()
    windows: Annotated[tuple[Window, ...], Field(max_length=1000)] = ()
    limits: WaveLimits = WaveLimits()
    canary: Canary | None = None
    on_failure: Literal["stop", "continue", "roll_back"] = "stop"
    hooks: Annotated[tuple[Hook, ...], Field(max_length=16)] = ()
    start_at: Moment | None = None
    # As an export has it: a draft that was changed since is not replaced. A new wave is made from none.
    etag: Annotated[str, StringConstraints(max_length=64)] | None = None


# What a request says of a wave itself, besides its members.
SETTINGS = frozenset(WaveRequest.model_fields) - {"members", "etag"}


class Wave(Model):
    """As the store keeps it and as the API answers it."""

    id: UUID
    name: str
    state: WaveState = WaveState.DRAFT
    members: tuple[Member, ...] = ()
    groups: tuple[Group, ...] = ()
    windows: tuple[Window, ...] = ()
    limits: WaveLimits = WaveLimits()
    canary: Canary | None = None
    on_failure: Literal["stop", "continue", "roll_back"] = "stop"
    hooks: tuple[HookShown, ...] = ()
    start_at: Time | None = None
    forecast: WaveForecast | None = None
    # Lets the others go on once the canary has ended, well or not.
    canary_approval: Approval | None = None
    # Why it is held or has failed, in a sentence.
    reason: str | None = None
    submitted_by: Submitted = None
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None


class WaveSummary(Model):
    """A wave in a list: `counts` has its members by state."""

    id: UUID
    name: str
    state: WaveState
    counts: dict[MemberState, int]
    start_at: Time | None
    forecast: WaveForecast | None
    reason: str | None
    submitted_by: Submitted
    created_at: Time
    started_at: Time | None
    finished_at: Time | None


class WaveUpdate(Model):
    """Data of the stream's `event: wave`: the new state of a wave, or of the `member` that is named. `late_s`: of one that is
    healthy, how much later than forecast its cut-over began; below zero: earlier."""

    id: UUID
    state: WaveState | None = None
    reason: str | None = None
    member: str | None = None
    member_state: MemberState | None = None
    job_id: UUID | None = None
    cause: str | None = None
    late_s: float | None = None


class ApprovalRequest(Received):
    """Approval by `approver`, a name of `approvers`, for these members (none named: all that wait for it); or for the canary,
    which lets the others go on."""

    approver: Name | None = None
    members: Annotated[tuple[MemberId, ...], Field(max_length=MEMBERS_MAX)] = ()
    canary: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.canary == (self.approver is not None):
            raise ValueError("name an approver, or approve the canary")
        return self


class WaveRetryRequest(Received):
    """Which members are retried; none named: all that failed."""

    members: Annotated[tuple[MemberId, ...], Field(max_length=MEMBERS_MAX)] = ()


class RollBackRequest(Received):
    """Which members are rolled back; none named: all that were moved or are being moved."""

    members: Annotated[tuple[MemberId, ...], Field(max_length=MEMBERS_MAX)] = ()
