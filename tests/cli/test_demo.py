"""What an interrupted demonstration leaves. With a real guest: tests/real/test_service.py."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
import typer

from synvirt.cli import demo
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


class Runs:
    """A service that runs until it is stopped."""

    address = "https://127.0.0.1:0"

    def __init__(self) -> None:
        self.removed = list[UUID]()
        self.begun = self.ended = False
        self._stopped = threading.Event()

    def run(self, *, on_ready: Callable[[], None]) -> None:
        self.begun = True
        on_ready()
        self._stopped.wait()
        self.ended = True

    def stop(self) -> None:
        self._stopped.set()

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        return b"id"

    def remove(self, job: Migration) -> None:
        self.removed.append(job.id)


@pytest.mark.parametrize("moment", ["start", "submit", "watch", "verdict", "_prove", "_summary", "remove"])
def test_whenever_it_is_interrupted_nothing_of_it_stays(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C that comes right as one of its steps has been done, and nothing was done with what came of it."""
    service, runs, ova = Service(tmp_path / "data"), Runs(), tmp_path / "synvirt-demo-1f3a.ova"
    left = [moment]

    def then_interrupted(of: Any, name: str, do: Callable[..., Any]) -> None:
        def done(*arguments: Any, **named: Any) -> Any:
            result = do(*arguments, **named)
            if name in left and (name != "start" or arguments[0].name == "service"):
                left.remove(name)
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(of, name, done)

    def made(*_: object) -> Sample:
        ova.write_bytes(b"sample")
        return Sample(ova, "id", 1)

    def watched(client: Client, job: Migration, **_: object) -> Migration:
        if job.state is State.QUEUED:
            service.move(job.id, State.COMPLETED)
        return client.migration(job.id)

    @contextlib.contextmanager
    def started(_: object) -> Iterator[Runs]:
        with service.served():
            yield runs

    monkeypatch.setattr(demo, "_sample", made)
    then_interrupted(threading.Thread, "start", threading.Thread.start)
    then_interrupted(Client, "submit", Client.submit)
    then_interrupted(demo, "watch", watched)
    then_interrupted(demo, "verdict", lambda job: True)
    for name in ("_prove", "_summary"):
        then_interrupted(demo, name, lambda *_: None)
    then_interrupted(runs, "remove", runs.remove)
    try:
        with pytest.raises(typer.Exit) as ended:
            demo.demo(cast(demo.StartService, started), service.settings, payload_mib=8, stay=False)
        assert ended.value.exit_code == 130
        assert (runs.begun, runs.ended) == (True, True)
    finally:
        runs.stop()
        service.close()
    assert not ova.exists()
    assert left == []
    assert bool(runs.removed) == (moment != "start")
    assert capsys.readouterr().out.splitlines()[-1] == "Interrupted: no guest, volume or job of the demonstration is left"
