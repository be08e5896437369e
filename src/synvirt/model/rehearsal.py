"""A rehearsal: a job's guest, started from clones of its volumes while the copying goes on."""

from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from synvirt.model.checks import WITHIN_S, Argument, PageUrl, Within
from synvirt.model.problems import Problem
from synvirt.model.submitter import Submitted
from synvirt.model.values import WHOLE, Model, Received, Time

CHECKS_MAX = 32
# Two at least: a single job has its own rehearsal.
MEMBERS_LEAST = 2
# The most members: each is a running guest, with all of its memory.
MEMBERS_MAX = 32


class RehearsalState(StrEnum):
    """States of a rehearsal; Passed, Failed and Cancelled are its ends."""

    WAITING = "Waiting"
    PREPARING = "Preparing"
    BOOTING = "Booting"
    CHECKING = "Checking"
    SWEEPING = "Sweeping"
    PASSED = "Passed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


REHEARSED = frozenset({RehearsalState.PASSED, RehearsalState.FAILED, RehearsalState.CANCELLED})


class CommandCheck(Received):
    """A program that the guest's agent runs; it must end with 0 before `within_s` is over, and is run again until then."""

    kind: Literal["command"]
    argv: Annotated[tuple[Argument, ...], Field(min_length=1, max_length=64)]
    within_s: Within = WITHIN_S


class PortCheck(Received):
    """A TCP port of the guest that takes a connection."""

    kind: Literal["port"]
    port: Annotated[int, Field(ge=1, le=65535), WHOLE]
    within_s: Within = WITHIN_S


# fmt: off
Role = Literal[
    "dns", "domain-controller", "mail", "web", "web-tls", "sql-server", "mysql", "postgresql", "oracle", "ssh", "rdp", "smb",
    "nfs",
]
# fmt: on
# The TCP port of each role (IANA's registry of ports).
ROLE_PORTS: dict[Role, int] = {
    "dns": 53,
    "domain-controller": 389,
    "mail": 25,
    "web": 80,
    "web-tls": 443,
    "sql-server": 1433,
    "mysql": 3306,
    "postgresql": 5432,
    "oracle": 1521,
    "ssh": 22,
    "rdp": 3389,
    "smb": 445,
    "nfs": 2049,
}


class RoleCheck(Received):
    """A role of the guest: the port of that role takes a connection."""

    kind: Literal["role"]
    role: Role
    within_s: Within = WITHIN_S


class PageCheck(Received):
    """A page that the guest answers with a status below 400. The host in the URL is only the name in the request; it is always
    sent to the guest."""

    kind: Literal["http"]
    url: PageUrl
    within_s: Within = WITHIN_S


AnyCheck = Annotated[CommandCheck | PortCheck | RoleCheck | PageCheck, Field(discriminator="kind")]


class RehearsalRequest(Received):
    """`checks`: run once the guest has booted."""

    checks: Annotated[tuple[AnyCheck, ...], Field(max_length=CHECKS_MAX)] = ()


class RehearsedJob(Received):
    """One of the jobs that are rehearsed together, and the checks of its guest."""

    migration_id: UUID
    checks: Annotated[tuple[AnyCheck, ...], Field(max_length=CHECKS_MAX)] = ()


class TogetherRequest(Received):
    """The guests of these jobs, started in this order in one network; or the guests of a wave's warm members, each with its
    member's checks."""

    members: Annotated[tuple[RehearsedJob, ...], Field(min_length=MEMBERS_LEAST, max_length=MEMBERS_MAX)] = ()
    wave_id: UUID | None = None


class Together(Model):
    """Guests in one network: a rehearsal each, in the order of their start."""

    id: UUID
    rehearsals: tuple[UUID, ...]


class CheckResult(Model):
    """`detail`: the sign that was seen, or what was wrong."""

    name: str
    ok: bool
    detail: str


Grade = Literal["same", "expected", "look", "wrong"]


class Sameness(Model):
    """A fact of the source, and the same fact of the guest here, rehearsed or moved (`clone`). `expected`: the move itself
    makes the difference; `look`: a person should look at it; `wrong`: the guest is not as it was."""

    item: str
    source: str | None
    clone: str | None
    grade: Grade
    reason: str = ""


class Rehearsal(Model):
    """`started_at`: when the volumes were cloned. `moment`: the moment of the source that the clones have. `outage_s`: the
    outage as it would have been: the forecast's shutdown and last copy, and the rehearsed conversion and boot. `outcome`: the
    state that it ends in, once all that it made is gone. `screenshot_url`: under /api/v1/migrator."""

    id: UUID
    migration_id: UUID
    state: RehearsalState = RehearsalState.WAITING
    asked: RehearsalRequest = RehearsalRequest()
    together: Together | None = None
    # One of several together: its checks are done, and it stays for the others.
    checked: bool = False
    submitted_by: Submitted = None
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None
    moment: Time | None = None
    # The host that has the clones.
    host: str | None = None
    conversion_s: float | None = None
    boot_s: float | None = None
    boot_sign: str | None = None
    outage_s: float | None = None
    checks: tuple[CheckResult, ...] = ()
    # The facts on the disks before the first boot; empty again once they were compared.
    read: dict[str, str] = Field(default_factory=dict)
    # Empty, where neither the source nor the guest reports facts.
    sameness: tuple[Sameness, ...] = ()
    screenshot_url: str | None = None
    error: Problem | None = None
    outcome: RehearsalState | None = None

    @property
    def ended(self) -> bool:
        return self.state in REHEARSED


class RehearsalPage(Model):
    """Of one job, newest first; or those that were asked for together. `next_cursor` of the last page is null; otherwise send
    it as `?cursor=`."""

    items: tuple[Rehearsal, ...]
    next_cursor: str | None = None
