"""What an interrupted demonstration leaves. With a real guest: tests/real/test_service.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest

from synvirt.cli.client import Client
from synvirt.cli.demo import RunningService, _tidy
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import Target
from synvirt.sample import Sample
from tests.fakes.service import PLAN, Service


@pytest.mark.parametrize(
    ("state", "is_removed"),
    [
        (State.COMPLETED, True),
        (State.FAILED, True),  # for example its guest did not boot, and its volume is kept
        (State.CANCELLED, False),  # which has removed all by itself
    ],
)
def test_however_its_job_ended_nothing_of_it_stays(state: State, is_removed: bool, tmp_path: Path) -> None:
    service, removed = Service(tmp_path), list[UUID]()
    with service.served(), Client.local(service.settings.socket_path) as client:
        job = service.submit(PLAN.model_copy(update={"target": Target(name="synvirt-demo-1f3a")}))
        service.submit(PLAN.model_copy(update={"target": Target(name="another")}))
        service.move(job.id, state)
        runs = SimpleNamespace(remove=lambda ended: removed.append(cast(Migration, ended).id))
        _tidy(cast(RunningService, runs), client, Sample(tmp_path / "synvirt-demo-1f3a.ova", "id", 1))
        assert len(json.loads(client.ask("GET", "/migrations"))["items"]) == 2
    service.close()
    assert removed == ([job.id] if is_removed else [])
