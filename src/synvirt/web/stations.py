"""A job's states as a line of stations: past ones, the present one, and future ones."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from synvirt.migrations.states import Facts, next_state
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS, Mode, State


@dataclass(frozen=True, slots=True)
class Station:
    """`seconds`: how long the job was there; None for the present and future ones. `at`: when it came there."""

    state: State
    place: Literal["passed", "here", "ahead", "end"]
    at: datetime | None = None
    seconds: float | None = None


def stations(job: Migration) -> list[Station]:
    """The table of states gives the future stations of this job. A failed or cancelled one has none."""
    visits = [visit for before, visit in zip((None, *job.history), job.history, strict=False) if _moved(before, visit)]
    line: list[Station] = []
    for visit, following in zip(visits, [*visits, None][1:], strict=True):
        if following is not None:
            line.append(Station(visit.state, "passed", visit.at, (following.at - visit.at).total_seconds()))
        else:
            line.append(Station(visit.state, "end" if visit.state in ENDS else "here", visit.at))
    state = job.state
    while state not in ENDS:
        state = next_state(state, _expected(job))
        line.append(Station(state, "ahead"))
    return line


def _moved(before: object, visit: object) -> bool:
    """A state that follows itself (the next delta) is one station."""
    return getattr(before, "state", None) != getattr(visit, "state", None)


def _expected(job: Migration) -> Facts:
    family = job.manifest.guest_os.family if job.manifest is not None else "other"
    prepare = {"always": True, "auto": family == "windows", "never": False}[job.plan.conversion]
    warm = job.plan.source.Live is not None and job.mode_effective == Mode.WARM
    return Facts(warm=warm, prepare=prepare, converged=True, repair=job.repair is not None)
