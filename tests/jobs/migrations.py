"""Jobs for tests of the kernel, which looks at nothing of them but their state."""

from pathlib import Path
from uuid import uuid4

from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.values import now
from tests.house import offline_plan


def migration(**fields: object) -> Migration:
    plan = offline_plan(Path("/imports/a"))
    return Migration(id=uuid4(), name="a", plan=plan, mode_effective=Mode.COLD, created_at=now()).model_copy(update=fields)
