"""A repository that was moved, and a peer with another certificate, password or address: by the API, the command line and the
page. Its jobs and restore points stay."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from synvirt.cli import app
from tests.backups.peers import PASSWORD, USER, Peer
from tests.drawn import drawn
from tests.fakes.backups import ended
from tests.fakes.service import Service

API = "http://synvirt/api/v1/backup"
Ask = Callable[..., Any]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "data")
    made.guests.image("web", drawn(3_000_001))
    with made.served():
        yield made
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with service.local() as made:
        yield made


@pytest.fixture
def ask(client: httpx.Client) -> Ask:
    def ask(method: str, path: str, status: int = 200, json: object = None) -> Any:
        answer = client.request(method, API + path, json=json)
        assert answer.status_code == status, answer.text
        assert PASSWORD not in answer.text
        return answer.json() if answer.content else None

    return ask


def added(ask: Ask, name: str, **place: object) -> str:
    return str(ask("POST", "/repositories", 201, {"name": name, **place})["id"])


def place_of(peer: Peer) -> dict[str, object]:
    return {
        "url": peer.place.url,
        "fingerprint_sha256": peer.place.fingerprint_sha256,
        "credentials": {"username": USER, "password": PASSWORD},
    }


def places(ask: Ask) -> list[dict[str, object]]:
    """Without what others write onto the same file system."""
    return [{**one, "used_bytes": None} for one in ask("GET", "/repositories")["items"]]


def run(service: Service, ask: Ask, job: str) -> str:
    done = ended(service.backups, ask("POST", f"/jobs/{job}/run", 202)["id"])
    assert (done.status, done.error) == ("completed", None)
    return str(done.restore_point_ids[0])


def verified(service: Service, ask: Ask, point: str) -> bool:
    return ended(service.backups, ask("POST", f"/restore-points/{point}/verify", 202)["id"]).status == "completed"


def typed(service: Service, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["--data-dir", str(service.settings.data_dir), "backup", *map(str, arguments)])


def test_a_peer_shows_another_certificate_and_is_found_at_another_address(
    service: Service, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's own certificate changes once a year: its repository could only be forgotten, with all jobs removed first."""
    home = Peer(tmp_path / "home")
    with home.served():
        repository = added(ask, "far", kind="peer", peer=place_of(home))
        job = ask("POST", "/jobs", 201, {"name": "nightly", "vm_ids": ["web"], "repository_id": repository})["id"]
        point = run(service, ask, job)
    home.forget_certificate()
    with home.served():
        assert ask("GET", f"/repositories/{repository}")["state"] == "unreachable"
        new = home.place.fingerprint_sha256.replace(":", "").lower()
        changed = ask("PATCH", f"/repositories/{repository}", json={"peer": {"fingerprint_sha256": new}})
        assert (changed["state"], changed["peer"]["fingerprint_sha256"]) == ("ready", home.place.fingerprint_sha256)
        assert (changed["peer"]["username"], changed["points_count"]) == (USER, 1)
        assert verified(service, ask, point)
        run(service, ask, job)
    elsewhere = Peer(tmp_path / "home")  # of the same folder, at another port
    with elsewhere.served():
        to = {"url": elsewhere.place.url}
        refused = ask("PATCH", f"/repositories/{repository}", 400, {"peer": to})
        assert (refused["code"], "credentials" in refused["detail"]) == ("E_BAK_BAD_REQUEST", True)
        monkeypatch.setenv("SYNVIRT_PEER_PASSWORD", PASSWORD)
        assert typed(service, "change-repository", "far", "--peer", elsewhere.place.url).exit_code == 2
        done = typed(service, "change-repository", "far", "--peer", elsewhere.place.url, "--peer-user", USER)
        assert (done.exit_code, "is changed" in done.stdout) == (0, True), done.output
        assert verified(service, ask, point)


def test_a_change_that_does_not_lead_to_it_is_refused_and_nothing_has_changed(
    service: Service, ask: Ask, tmp_path: Path
) -> None:
    for name in ("here", "other", "empty"):
        (tmp_path / name).mkdir()
    peer = Peer(tmp_path / "home")
    with peer.served():
        far = added(ask, "far", kind="peer", peer=place_of(peer))
        here = added(ask, "here", kind="local", path=str(tmp_path / "here"))
        added(ask, "other", kind="local", path=str(tmp_path / "other"))
        before = places(ask)
        wrong = {"username": USER, "password": "another one"}
        for repository, change, status in (
            (far, {"peer": {"credentials": wrong}}, 502),
            (far, {"peer": {"fingerprint_sha256": "00" * 32}}, 502),
            (far, {"peer": {"credentials": {"username": USER}}}, 400),
            (far, {"path": str(tmp_path / "here")}, 400),
            (here, {"peer": place_of(peer)}, 400),
            (here, {"path": str(tmp_path / "other")}, 409),
            (here, {"path": str(tmp_path / "empty")}, 502),
            (here, {"path": str(tmp_path / "missing")}, 502),
            (here, {"path": "relative"}, 400),
            (here, {"name": "other"}, 409),
            (here, {"kind": "nfs"}, 400),
        ):
            ask("PATCH", f"/repositories/{repository}", status, change)
        # The folder of another repository, by another name of it.
        (tmp_path / "link").symlink_to(tmp_path / "other")
        assert ask("PATCH", f"/repositories/{here}", 400, {"path": str(tmp_path / "link")})["code"] == "E_BAK_KEY_WRONG"
        assert places(ask) == before


def test_a_folder_is_moved_while_no_run_uses_it(service: Service, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    repository = added(ask, "here", kind="local", path=str(tmp_path / "here"))
    job = ask("POST", "/jobs", 201, {"name": "nightly", "vm_ids": ["web"], "repository_id": repository})["id"]
    first = run(service, ask, job)
    (tmp_path / "here").rename(tmp_path / "there")
    done = typed(service, "change-repository", "here", "--folder", tmp_path / "there", "--name", "there")
    assert done.exit_code == 0, done.output
    second = run(service, ask, job)
    assert [verified(service, ask, point) for point in (first, second)] == [True, True]
    assert ask("GET", f"/repositories/{repository}")["name"] == "there"
    held = service.backups._no_run_of(service.backups.repositories.known()[0].id, lambda: None)
    with held:
        assert ask("PATCH", f"/repositories/{repository}", 409, {"name": "x"})["code"] == "E_BAK_CONFLICT"


def test_a_change_while_a_change_of_the_key_is_unfinished(
    service: Service, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's certificate changed in between: the key's change goes on once the peer is found again."""
    home = Peer(tmp_path / "home")
    with home.served():
        repository = added(ask, "far", kind="peer", peer=place_of(home))
        link = os.link

        def full(old: Path, new: Path) -> None:
            if ".before-" in new.name:  # the old key, kept when all else is done
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new))
            link(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "link", full)
            failed = ask("POST", f"/repositories/{repository}/change-key", 500)
            assert "No space left on device" in failed["detail"]
            assert "free some space" in failed["hint"]
    home.forget_certificate()
    with home.served():
        new = home.place.fingerprint_sha256
        assert ask("PATCH", f"/repositories/{repository}", json={"peer": {"fingerprint_sha256": new}})["state"] == "ready"


def test_on_the_page(service: Service, client: httpx.Client, ask: Ask, tmp_path: Path) -> None:
    home = Peer(tmp_path / "home")
    with home.served():
        repository = added(ask, "far", kind="peer", peer=place_of(home))
    home.forget_certificate()
    here = f"http://synvirt/backups/repositories/{repository}"
    with home.served():
        shown = client.get(f"{here}/change").text
        assert (USER in shown, PASSWORD in shown) == (True, False)
        form = {"name": "far", "peer.url": home.place.url, "peer.username": USER, "peer.fingerprint_sha256": "12"}
        refused = client.post(f"{here}/change", data=form)
        assert (refused.status_code, "is not a SHA-256" in refused.text) == (400, True)
        form["peer.fingerprint_sha256"] = home.place.fingerprint_sha256
        done = client.post(f"{here}/change", data=form, follow_redirects=False)
        assert (done.status_code, done.headers["location"]) == (303, f"/backups/repositories/{repository}")
        assert ask("GET", f"/repositories/{repository}")["state"] == "ready"
        other = client.post(f"{here}/change", data=form | {"peer.url": "https://peer.example:8441/x"})
        assert (other.status_code, "required with another" in other.text) == (400, True)
