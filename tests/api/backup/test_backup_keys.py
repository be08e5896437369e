"""A repository's key: changed and copied, by the API, the command line and the page."""

import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.repository.manifest import Mark
from tests.fakes.backups import ended
from tests.fakes.service import Service
from tests.running.processes import until

API = "http://synvirt/api/v1/backup"
PASSPHRASE = "correct horse battery staple"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "here").mkdir()
    made = Service(tmp_path / "data")
    with made.served():
        yield made
    made.close()


@pytest.fixture
def ask(service: Service, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with service.local() as client:

        def ask(method: str, path: str, status: int = 200, json: object = None) -> Any:
            answer = client.request(method, API + path, json=json)
            assert answer.status_code == status, answer.text
            return answer.json() if answer.content else None

        yield ask


@pytest.fixture
def repository(ask: Callable[..., Any], tmp_path: Path) -> str:
    request = {"name": "here", "kind": "local", "path": str(tmp_path / "here")}
    return str(ask("POST", "/repositories", 201, request)["id"])


def test_runs_after_a_change_count_from_no_point_before_it(
    service: Service, ask: Callable[..., Any], repository: str, tmp_path: Path
) -> None:
    service.guests.image("web", b"A" * 5000)
    service.guests.mark = Mark(kind="checkpoint", name="one")
    job = ask("POST", "/jobs", 201, {"name": "nightly", "vm_ids": ["web"], "repository_id": repository})["id"]

    def run() -> str:
        done = ended(service.backups, ask("POST", f"/jobs/{job}/run", 202)["id"])
        assert (done.status, done.warnings) == ("completed", ())
        return str(done.restore_point_ids[0])

    old_key = ask("GET", f"/repositories/{repository}/recovery-key")["recovery_key"]
    first, second = run(), run()
    new_key = ask("POST", f"/repositories/{repository}/change-key")["recovery_key"]
    third, _ = run(), run()
    assert [None if one is None else str(one) for one in service.guests.bases] == [None, first, None, third]
    for point in (first, second, third):
        assert ended(service.backups, ask("POST", f"/restore-points/{point}/verify", 202)["id"]).status == "completed"
    # Elsewhere: by the new key alone.
    ask("DELETE", f"/jobs/{job}", 204)
    ask("DELETE", f"/repositories/{repository}", 204)
    again = {"name": "again", "kind": "local", "path": str(tmp_path / "here")}
    refused = ask("POST", "/repositories", 400, again | {"recovery_key": old_key})
    assert (refused["code"], "newer key" in refused["detail"]) == ("E_BAK_KEY_WRONG", True)
    ask("POST", "/repositories", 201, again | {"recovery_key": new_key})
    assert {one["id"] for one in ask("GET", "/restore-points")["items"]} >= {first, second, third}


def test_no_change_while_a_run_writes(service: Service, ask: Callable[..., Any], repository: str) -> None:
    service.guests.image("web", b"A" * 5000)
    going, entered = threading.Event(), threading.Event()

    def gate() -> None:
        entered.set()
        assert going.wait(60)

    service.guests.gate = gate
    job = ask("POST", "/jobs", 201, {"name": "nightly", "vm_ids": ["web"], "repository_id": repository})["id"]
    run = ask("POST", f"/jobs/{job}/run", 202)["id"]
    until(entered.is_set)
    assert ask("POST", f"/repositories/{repository}/change-key", 409)["code"] == "E_BAK_CONFLICT"
    going.set()
    assert ended(service.backups, run).status == "completed"
    ask("POST", f"/repositories/{repository}/change-key")


def test_a_sealed_copy(ask: Callable[..., Any], repository: str, tmp_path: Path) -> None:
    path = f"/repositories/{repository}/sealed-key"
    assert "12 characters" in ask("POST", path, 400, {"passphrase": "short"})["detail"]
    for wrong in ({}, {"passphrase": PASSPHRASE, "bound_to": "host"}, {"bound_to": "moon"}):
        ask("POST", path, 400, wrong)
    copy = ask("POST", path, json={"passphrase": PASSPHRASE})["sealed_key"]
    ask("DELETE", f"/repositories/{repository}", 204)
    again = {"name": "again", "kind": "local", "path": str(tmp_path / "here"), "recovery_key": copy}
    assert ask("POST", "/repositories", 400, again)["code"] == "E_BAK_KEY_WRONG"
    ask("POST", "/repositories", 201, again | {"passphrase": PASSPHRASE})


def test_at_the_command_line(service: Service, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_PASSPHRASE", PASSPHRASE)

    def printed(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["--data-dir", str(service.settings.data_dir), "backup", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output.strip()

    old = printed("recovery-key", "here")
    new = printed("change-key", "here").splitlines()[-1]
    assert (new != old, printed("recovery-key", "here")) == (True, new)
    copy = printed("seal-key", "here")
    printed("forget-repository", "here")
    monkeypatch.setenv("SYNVIRT_RECOVERY_KEY", copy)
    assert printed("add-repository", tmp_path / "here", "--name", "again", "--existing").splitlines()[-1] == new


def test_on_the_page(service: Service, repository: str) -> None:
    here = f"http://synvirt/backups/repositories/{repository}"
    with service.local() as client:
        old = service.backups.repositories.recovery_key(service.backups.repositories.known()[0].id)
        assert "Change the key" in client.get(here).text
        assert "Other hosts" in client.get(f"{here}/change-key").text
        changed = client.post(f"{here}/change-key").text
        new = service.backups.repositories.recovery_key(service.backups.repositories.known()[0].id)
        assert (new in changed, old in changed, new == old) == (True, False, False)
        sealed = client.post(f"{here}/sealed-key", data={"passphrase": PASSPHRASE})
        assert "synvirt-key-1:scrypt:" in unescape(sealed.text)
        assert new not in sealed.text
        assert "12 characters" in client.post(f"{here}/sealed-key", data={"passphrase": "short"}).text
