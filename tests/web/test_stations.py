from uuid import uuid4

import pytest

from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from synvirt.web.stations import stations
from tests.fakes.service import PLAN


@pytest.mark.parametrize(("state", "shown"), [(State.COMPLETED, []), (State.STARTING, ["Completed"])])
def test_a_job_whose_document_has_no_history(state: State, shown: list[str]) -> None:
    """One of an earlier version, or that a tool has put there: its page is shown all the same."""
    job = Migration(id=uuid4(), name="web", plan=PLAN, state=state, mode_effective=Mode.COLD, created_at=now())
    assert [str(one.state) for one in stations(job)] == shown
