"""Waves for tests: a member in a word, and fleets drawn from a seed."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from synvirt.fleet.model import Group, MemberRequest, WaveRequest
from synvirt.model.plan import MigrationPlan
from synvirt.model.windows import Window

SOURCE = UUID(int=1)


def plan(vm: str, source: UUID = SOURCE) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {
            "source": {"Live": "vim_api"},
            "source_ref": {"kind": "live_vm", "source_id": str(source), "vm_id": vm},
            "mode": "Warm",
        }
    )


def member(name: str, *after: str, **fields: Any) -> MemberRequest:
    return MemberRequest(id=name, vm=name, plan=fields.pop("plan", None) or plan(name), after=after, **fields)


def wave(*members: MemberRequest, groups: Sequence[Group] = (), windows: Sequence[Window] = (), **fields: Any) -> WaveRequest:
    return WaveRequest(name="night", members=members, groups=tuple(groups), windows=tuple(windows), **fields)
