"""A night in which a wave is carried out against the fake platform; the night is a moment."""

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from synvirt.fleet.carrying import Carrying
from synvirt.fleet.changing import failed
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.model import (
    MemberState,
    Wave,
    WaveRequest,
    WaveState,
)
from synvirt.fleet.waves import Waves
from synvirt.migrations.engine import Engine
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from synvirt.model.windows import Window
from synvirt.proof.health import Checker
from synvirt.sizes import KIB, MIB
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import House, live_plan
from tests.running.processes import until

S, W = MemberState, WaveState
SICK = {"kind": "command", "argv": ["false"], "within_s": 0.1}
CONTENT = random.Random(5).randbytes(64 * KIB)


class Night:
    """A house with an engine and the scheduler of waves; a tick is called for. `later`: how much later the clock is."""

    def __init__(self, folder: Path, hypervisor: FakeHypervisor | None = None) -> None:
        self.house = House(folder, workers=in_process, hypervisor=hypervisor)
        self.store = self.house.store
        self.engine = Engine(self.house.rooms, host="local")
        self.house.intake._begin, self.house.intake._wake = self.engine.begin, self.engine.wake
        self.waves = Waves(self.store.waves)
        self.later = timedelta(0)
        self.begin_anew()
        self.engine.start()

    def begin_anew(self) -> None:
        """The scheduler with nothing in memory."""
        self.side = HostSide(
            self.house.rooms,
            Checker(self.house.hypervisor),
            cancel=self.house.intake.cancel,
            failed=partial(failed, self.store.waves),
        )
        self.carrying = Carrying(self.house.intake, self.side, clock=lambda: now() + self.later)

    def vms(self, *names: str, **more: Any) -> None:
        for name in names:
            self.house.platform.add_vm(name, {"disk-0": CONTENT}, **more)

    def until(self, wave_id: UUID, what: Callable[[Wave], bool]) -> Wave:
        """The wave as it was then: its jobs go on."""
        seen: list[Wave] = []

        def reached() -> bool:
            self.carrying.tick()
            seen[:] = [self.waves.whole(wave_id)]
            return what(seen[0])

        until(reached)
        return seen[0]

    def close(self) -> None:
        self.side.close()
        self.engine.close()
        self.house.close()


def plan_of(vm: str, **fields: Any) -> MigrationPlan:
    plan = live_plan(**{"warm": {"delta_threshold_bytes": MIB}, **fields})
    return plan.model_copy(update={"source_ref": plan.source_ref.model_copy(update={"vm_id": vm})})


def wave(*members: dict[str, Any], windows: tuple[Window, ...] = (), **fields: Any) -> WaveRequest:
    made = [{"vm": one["id"], "plan": plan_of(one["id"]), **one} for one in members]
    return WaveRequest.model_validate({"name": "night", "members": made, "windows": windows, **fields})


def states(seen: Wave) -> dict[str, MemberState]:
    return {one.id: one.state for one in seen.members}


def window(start: datetime, end: datetime) -> Window:
    return Window(id="w", name="the night", start=start.replace(tzinfo=None), end=end.replace(tzinfo=None))
