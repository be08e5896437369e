"""synvirt waves against a service whose waves the test moves itself."""

import json
import threading
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.cli.client import Client
from synvirt.cli.waves import showing
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState, WaveState
from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.fleet.made import member, wave


def ended(service: Service, state: WaveState) -> str:
    """A wave that has ended, and whose member ended after it."""
    made = service.waves.create(wave(member("shop")))
    service.waves.go(made.id)
    service.waves._change(made.id, set(WaveState), lambda before: before.model_copy(update={"state": state}))
    (one,) = service.waves.whole(made.id).members
    change_members(service.store.waves, made.id, [one], {one.state}, {"state": MemberState.SKIPPED})
    return str(made.id)


@pytest.mark.parametrize(("state", "code"), [(WaveState.COMPLETED, 0), (WaveState.FAILED, 1), (WaveState.CANCELLED, 1)])
def test_to_watch_a_wave_ends_with_it(service: Service, run: Run, state: WaveState, code: int) -> None:
    id_ = ended(service, state)
    done = run("waves", "watch", id_)
    assert (done.exit_code, done.stdout) == (code, f"wave: {state}\n")


def test_a_wave_that_is_under_way_is_watched_to_its_end(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service.waves.create(wave(member("shop")))
    service.waves.go(made.id)
    is_shown = threading.Event()
    moved = showing._moved

    def noted(update: object) -> str:
        is_shown.set()
        return moved(update)

    monkeypatch.setattr(showing, "_moved", noted)

    def cancel() -> None:
        is_shown.wait(60)
        service.waves.cancel(made.id)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    done = run("waves", "watch", made.id)
    canceller.join()
    assert done.exit_code == 1
    assert done.stdout.splitlines() == ["wave: running", "wave: cancelled. It was cancelled."]


def test_who_stops_watching_is_told_that_the_wave_goes_on(service: Service, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service.waves.create(wave(member("shop")))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "follow", interrupted)
    done = run("waves", "watch", made.id)
    assert (done.exit_code, "synvirt waves watch" in done.stdout) == (130, True)


def test_a_draft_of_one_member_is_called_so(service: Service, run: Run) -> None:
    request = wave(member("shop"))
    done = run("waves", "import", "-", typed=json.dumps(request.model_dump(mode="json")))
    assert " is a draft with 1 member. " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("waves", "import", "FILE"),
        ("waves", "replace", "WAVE", "FILE"),
        ("waves", "simulate", "WAVE", "--more-destinations", "1", "--what-if", "FILE"),
        ("migrations", "submit", "FILE"),
        ("migrations", "dry-run", "FILE"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_a_file_is_not_explained_by_the_command_s_help(
    service: Service, run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file, id_ = tmp_path / "mistake.json", str(service.waves.create(wave(member("shop"))).id)
    for content in ('{"nam": "a"}', '{"name": "a"', "{}x") if command[1] == "import" else ('{"nam": "a"}', "[1]", ""):
        file.write_text(content)
        done = run(*({"FILE": str(file), "WAVE": id_}.get(word, word) for word in command))
        assert done.exit_code == 2 or "E_MIG_INVALID_PLAN" in done.stderr
        assert f"{file}" in done.stderr
        assert "hint: /openapi.json of the service describes it" in done.stderr
    file.write_text('{"name": "a", "name": "b"}')
    assert "name is given more than once" in run(*({"FILE": str(file), "WAVE": id_}.get(word, word) for word in command)).stderr


def test_an_export_replaces_only_the_draft_that_it_was_made_of(service: Service, run: Run, tmp_path: Path) -> None:
    id_, file = str(service.waves.create(wave(member("shop"))).id), tmp_path / "wave.json"
    file.write_text(run("waves", "export", id_).stdout)
    assert run("waves", "replace", id_, file).exit_code == 0
    other = tmp_path / "other.json"
    other.write_text(wave(member("web")).model_dump_json())
    assert run("waves", "replace", id_, other).exit_code == 0
    done = run("waves", "replace", id_, file)
    assert (done.exit_code, "E_MIG_CONFLICT" in done.stderr) == (1, True)
    assert [one.id for one in service.waves.whole(UUID(id_)).members] == ["web"]
    assert run("waves", "import", file).exit_code == 0


def test_a_forecast_names_the_members_whose_size_is_not_known(service: Service, run: Run) -> None:
    """It said that the median of the others counts, also where there were none."""
    made = service.waves.create(wave(*(member(f"shop-{n:02}") for n in range(11))))
    done = run("waves", "simulate", str(made.id))
    named = ", ".join(f"shop-{n:02}" for n in range(10))
    assert f"The size of 11 members is not known. It is assumed: {named} …\n" in done.stdout, done.stdout + done.stderr
