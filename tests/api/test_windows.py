"""The windows of single jobs: their list, the plans that name them, the commands, the pages."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.main import app
from synvirt.model.kinds import State
from synvirt.model.values import now
from tests.fakes.service import PREFIX, Service
from tests.house import live_plan

NIGHT: dict[str, Any] = {
    "id": "saturdays",
    "name": "Saturday night",
    "timezone": "Europe/Berlin",
    "rrule": "FREQ=WEEKLY",
    "start": "2026-11-28T22:00:00",
    "end": "2026-11-29T04:00:00",
    "lockouts": [{"start": "2026-12-26T00:00:00", "end": "2026-12-27T12:00:00"}],
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    with made.served():
        yield made
    made.close()


def run(service: Service, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["--data-dir", str(service.settings.data_dir), *arguments])
    return done.exit_code, done.output


def asked(client: httpx.Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = client.request(method, f"http://synvirt{PREFIX}{path}", json=body)
    return answer.status_code, answer.json() if answer.content else None


def test_windows_are_made_listed_changed_and_removed(client: httpx.Client, service: Service) -> None:
    status, made = asked(client, "POST", "/windows", NIGHT)
    assert status == 201
    assert {name: made[name] for name in NIGHT} == NIGHT
    assert set(made) - set(NIGHT) == {"open", "opens_at", "closes_at"}
    assert asked(client, "GET", "/windows/saturdays") == (200, made)
    assert asked(client, "POST", "/windows", NIGHT)[0] == 409
    asked(client, "POST", "/windows", NIGHT | {"id": "again"})
    first = asked(client, "GET", "/windows?limit=1")[1]
    assert ([one["id"] for one in first["items"]], first["next_cursor"]) == (["again"], "again")
    assert [one["id"] for one in asked(client, "GET", "/windows?cursor=again")[1]["items"]] == ["saturdays"]
    longer = NIGHT | {"end": "2026-11-29T05:00:00", "rrule": None}
    assert asked(client, "PUT", "/windows/saturdays", longer)[1]["end"] == "2026-11-29T05:00:00"
    assert asked(client, "DELETE", "/windows/again") == (204, None)
    status, missing = asked(client, "GET", "/windows/saturday")
    assert (status, missing["code"], missing["hint"]) == (404, "E_MIG_NOT_FOUND", "did you mean saturdays?")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"rrule": "FREQ=NEVER"}, "rrule"),
        ({"rrule": None, "start": "1200-01-01T00:00:00", "end": "1200-01-02T00:00:00"}, "start"),
        ({"end": "2026-11-28T21:00:00"}, "ends after it starts"),
        ({"timezone": "Berlin"}, "timezone"),
        ({"start": "2026-11-28T22:00:00Z"}, "start"),
        ({"id": "a b"}, "id"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_a_wrong_window_is_refused_by_its_field(client: httpx.Client, wrong: dict[str, Any], field: str) -> None:
    status, problem = asked(client, "POST", "/windows", NIGHT | wrong)
    assert (status, problem["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert field in problem["detail"]
    assert asked(client, "GET", "/windows")[1]["items"] == []


def test_a_window_keeps_its_id(client: httpx.Client) -> None:
    asked(client, "POST", "/windows", NIGHT)
    status, problem = asked(client, "PUT", "/windows/saturdays", NIGHT | {"id": "sundays"})
    assert (status, problem["detail"].partition(":")[0]) == (400, "id")


def test_a_job_in_a_window_on_its_page_and_in_its_sheet(client: httpx.Client, service: Service) -> None:
    tonight = {"start": (now() - timedelta(hours=1)).isoformat()[:19], "end": (now() + timedelta(hours=9)).isoformat()[:19]}
    asked(client, "POST", "/windows", NIGHT | tonight | {"timezone": "UTC", "lockouts": []})
    status, job = asked(client, "POST", "/migrations", {"plan": _plan(window_id="saturdays")})
    assert (status, job["plan"]["warm"]["window_id"], job["plan"]["warm"]["cutover"]) == (201, "saturdays", "manual")
    page = client.get(f"http://synvirt/migrations/{job['id']}").text
    assert "in window Saturday night" in page
    assert "open until" in page
    service.move(UUID(job["id"]), State.COPYING_FULL)
    service.move(UUID(job["id"]), State.DELTA_SYNCING)
    page = client.get(f"http://synvirt/migrations/{job['id']}").text
    assert "until its window is open" in page
    assert "/cutover" not in page
    assert "for its window: synvirt windows show saturdays" in run(service, "migrations", "show", job["id"])[1]
    status, problem = asked(client, "POST", f"/migrations/{job['id']}/cutover")
    assert (status, problem["code"]) == (409, "E_MIG_CONFLICT")
    assert asked(client, "DELETE", "/windows/saturdays")[0] == 409
    service.store.change(UUID(job["id"]), State.DELTA_SYNCING, lambda one: one.model_copy(update={"state": State.FAILED}))
    assert asked(client, "DELETE", "/windows/saturdays")[0] == 204


def test_a_member_of_a_wave_has_a_window_of_its_wave(client: httpx.Client) -> None:
    member = {"id": "db01", "vm": "db01", "plan": _plan(window_id="saturdays")}
    answer = client.post("http://synvirt/api/v1/waves", json={"name": "night", "members": [member]})
    assert answer.status_code == 400
    assert "members[0].plan.warm.window_id" in answer.json()["detail"]
    assert "window_id of the member" in answer.json()["hint"]


def _plan(**warm: Any) -> Any:
    return live_plan(warm=warm).model_dump(mode="json", exclude_none=True)


def test_the_commands(service: Service) -> None:
    assert run(service, "windows", "list") == (0, "There are no windows\n")
    given = ("--start", NIGHT["start"], "--end", NIGHT["end"], "--rule", "FREQ=WEEKLY", "--zone", "Europe/Berlin")
    code, said = run(service, "windows", "add", "saturdays", *given, "--lockout", "2026-12-26T00:00:00/2026-12-27T12:00:00")
    assert (code, "--window saturdays" in said) == (0, True)
    assert service.store.windows.get("saturdays").model_dump(mode="json") == NIGHT | {"name": "saturdays"}
    assert (
        run(service, "windows", "change", "saturdays", "--end", "2026-11-29T05:00:00", "--rule", "", "--name", "Once")[0] == 0
    )
    changed = service.store.windows.get("saturdays").model_dump(mode="json")
    assert changed == NIGHT | {"name": "Once", "rrule": None, "end": "2026-11-29T05:00:00"}
    assert "saturdays" in run(service, "windows", "list")[1]
    shown = run(service, "windows", "show", "saturdays")[1]
    assert "2026-12-26T00:00:00 to 2026-12-27T12:00:00" in shown
    assert "Europe/Berlin" in shown
    assert json.loads(run(service, "windows", "show", "saturdays", "--json")[1])["id"] == "saturdays"
    assert run(service, "windows", "add", "x", *given, "--lockout", "2026")[0] == 2
    assert run(service, "windows", "remove", "saturdays")[0] == 0
    assert run(service, "windows", "remove", "saturdays")[0] == 1
