"""A rehearsal: a job's guest, started from clones of its volumes while the copying goes on."""

from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, StringConstraints

from synvirt.model.problems import Problem
from synvirt.model.values import WHOLE, Model, Received, Time

CHECKS_MAX = 32
# One alone is rehearsed by itself.
MEMBERS_LEAST = 2
# Each is a guest that runs, with all of its memory.
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


Within = Annotated[float, Field(gt=0, le=3600)]


class CommandCheck(Received):
    """A program that the guest's agent runs; it must end with 0 before `within_s` is over, and is run again until then."""

    kind: Literal["command"]
    argv: Annotated[tuple[Annotated[str, StringConstraints(max_length=4096)], ...], Field(min_length=1, max_length=64)]
    within_s: Within = 120


class PortCheck(Received):
    """A TCP port of the guest that takes a connection."""

    kind: Literal["port"]
    port: Annotated[int, Field(ge=1, le=65535), WHOLE]
    within_s: Within = 120


# fmt: off
Role = Literal[
    "dns", "domain-controller", "mail", "web", "web-tls", "sql-server", "mysql", "postgresql", "oracle", "ssh", "rdp", "smb",
    "nfs",
]
# fmt: on
# Where a guest with that role is reached, by TCP (IANA's registry of ports).
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
    """What the guest is for: the port of that role takes a connection."""

    kind: Literal["role"]
    role: Role
    within_s: Within = 120


class PageCheck(Received):
    """A page that the guest answers with a status below 400. The URL's host is what it is asked for as; the guest is asked,
    whatever address that name has."""

    kind: Literal["http"]
    url: Annotated[str, StringConstraints(max_length=2048, pattern=r"^https?://")]
    within_s: Within = 120


AnyCheck = Annotated[CommandCheck | PortCheck | RoleCheck | PageCheck, Field(discriminator="kind")]


class RehearsalRequest(Received):
    """`checks`: what is asked of the guest once it has booted."""

    checks: Annotated[tuple[AnyCheck, ...], Field(max_length=CHECKS_MAX)] = ()


class RehearsedJob(Received):
    """A job of those that are rehearsed together, and what is asked of its guest."""

    migration_id: UUID
    checks: Annotated[tuple[AnyCheck, ...], Field(max_length=CHECKS_MAX)] = ()


class TogetherRequest(Received):
    """The guests of these jobs, started in this order, in one network. Or those of a wave's members that copy warm, each with
    the checks of its own member."""

    members: Annotated[tuple[RehearsedJob, ...], Field(min_length=MEMBERS_LEAST, max_length=MEMBERS_MAX)] = ()
    wave_id: UUID | None = None


class Together(Model):
    """Guests in one network: a rehearsal each, in the order of their start."""

    id: UUID
    rehearsals: tuple[UUID, ...]


class CheckResult(Model):
    """`detail`: the sign that was seen, or what was not as it should be."""

    name: str
    ok: bool
    detail: str


Grade = Literal["same", "expected", "look", "wrong"]


class Sameness(Model):
    """A fact of the source and of the guest here, a rehearsed or a moved one (`clone`). `expected`: the move itself makes the
    difference; `look`: a person should; `wrong`: the guest is not as it was."""

    item: str
    source: str | None
    clone: str | None
    grade: Grade
    reason: str = ""


class Rehearsal(Model):
    """`started_at`: the volumes were cloned. `moment`: of the source, as the clones have it. `outage_s`: what the outage would
    have been: the forecast's shutdown and last copy, and the conversion and the boot as they were rehearsed. `outcome`: what it
    ends as once all that it made is gone. `screenshot_url`: under /api/v1/migrator."""

    id: UUID
    migration_id: UUID
    state: RehearsalState = RehearsalState.WAITING
    asked: RehearsalRequest = RehearsalRequest()
    together: Together | None = None
    # Of those together: its checks are done, and it stays for the others.
    checked: bool = False
    submitted_by: str | None = None
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None
    moment: Time | None = None
    # Where the clones are.
    host: str | None = None
    conversion_s: float | None = None
    boot_s: float | None = None
    boot_sign: str | None = None
    outage_s: float | None = None
    checks: tuple[CheckResult, ...] = ()
    # What the disks said before the first boot; empty again once it was compared.
    read: dict[str, str] = Field(default_factory=dict)
    # Empty, where neither the source nor the guest says anything of itself.
    sameness: tuple[Sameness, ...] = ()
    screenshot_url: str | None = None
    error: Problem | None = None
    outcome: RehearsalState | None = None

    @property
    def ended(self) -> bool:
        return self.state in REHEARSED


class RehearsalPage(Model):
    """Of one job, newest first: all that are kept."""

    items: tuple[Rehearsal, ...]
