"""The short lists have pages as the long ones have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from synvirt.destinations.directory import DirectoryDestination
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.rehearsal import Rehearsal, RehearsalRequest, RehearsalState
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.fakes.service import PLAN, Service

API = "http://synvirt/api/v1"
JOB = uuid4()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "a").mkdir()
    offers = {name: {"path": str(tmp_path / "a" / name), "user": name, "quota_bytes": MIB} for name in ("c", "a", "b")}
    made = Service(tmp_path / "data", backup_offers=offers, has_pages=False)
    made.store.add(Migration(id=JOB, name="web", plan=PLAN, mode_effective=Mode.COLD, created_at=now()), host="local")
    for host in ("kvm1", "kvm3", "kvm2"):
        made.store.hosts.begin(host, ttl_s=600, document="{}")
    made.destinations |= {name: DirectoryDestination(made.settings.volumes_dir) for name in ("z", "y")}
    for _ in range(3):
        _rehearsed(made)
    with made.served():
        yield made
    made.close()


def _rehearsed(service: Service) -> None:
    done = Rehearsal(
        id=uuid4(), migration_id=JOB, state=RehearsalState.PASSED, asked=RehearsalRequest(), submitted_by=None, created_at=now()
    )
    service.store.rehearsals.add([done])


def _token(client: httpx.Client, name: str) -> str:
    return str(client.post(f"{API}/tokens", json={"name": name}).json()["id"])


def _pages(client: httpx.Client, path: str, limit: int) -> list[list[dict[str, Any]]]:
    pages, cursor = list[list[dict[str, Any]]](), None
    while True:
        answer = client.get(f"{API}{path}", params={"limit": limit} | ({"cursor": cursor} if cursor else {}))
        assert answer.status_code == 200, answer.text
        pages.append(answer.json()["items"])
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return pages


@pytest.mark.parametrize(
    "path",
    [
        "/tokens",
        "/migrator/hosts",
        "/migrator/destinations",
        "/backup/offers",
        f"/migrator/migrations/{JOB}/rehearsals",
    ],
)
def test_the_pages_together_are_the_list(client: httpx.Client, path: str) -> None:
    for name in ("one", "two", "three"):
        _token(client, name)
    ((whole),) = _pages(client, path, 1000)
    assert len(whole) >= 3
    for limit in (1, 2, len(whole)):
        pages = _pages(client, path, limit)
        names = [one.get("id", one.get("name")) for page in pages for one in page]
        assert names == [one.get("id", one.get("name")) for one in whole]
        assert {len(page) for page in pages[:-1]} <= {limit}
    for foreign in ("no such", "0", "nobody"):
        refused = client.get(f"{API}{path}", params={"cursor": foreign})
        assert (refused.status_code, refused.json()["detail"].partition(":")[0]) == (400, "cursor")


def test_a_page_of_tokens_follows_one_whose_last_token_is_gone(client: httpx.Client) -> None:
    first, second, third = (_token(client, name) for name in ("one", "two", "three"))
    page = client.get(f"{API}/tokens", params={"limit": 2}).json()
    assert [one["id"] for one in page["items"]] == [first, second]
    assert client.delete(f"{API}/tokens/{second}").status_code == 204
    fourth = _token(client, "four")
    rest = client.get(f"{API}/tokens", params={"cursor": page["next_cursor"]}).json()
    assert [one["id"] for one in rest["items"]] == [third, fourth]


def test_a_page_of_windows_follows_one_whose_last_window_is_gone(client: httpx.Client) -> None:
    path = f"{API}/migrator/windows"
    once = {"timezone": "UTC", "start": "2030-01-01T00:00:00", "end": "2030-01-01T02:00:00"}
    for name in ("c", "a", "B", "b"):
        assert client.post(path, json={"id": name, "name": name, **once}).status_code == 201
    page = client.get(path, params={"limit": 2}).json()
    assert [one["id"] for one in page["items"]] == ["B", "a"]
    assert client.delete(f"{path}/a").status_code == 204
    rest = client.get(path, params={"cursor": page["next_cursor"]}).json()
    assert ([one["id"] for one in rest["items"]], rest["next_cursor"]) == (["b", "c"], None)


def test_a_page_of_rehearsals_follows_one_while_others_are_added(client: httpx.Client, service: Service) -> None:
    path = f"{API}/migrator/migrations/{JOB}/rehearsals"
    ids = [one["id"] for one in client.get(path).json()["items"]]
    page = client.get(path, params={"limit": 2}).json()
    _rehearsed(service)
    rest = client.get(path, params={"cursor": page["next_cursor"]}).json()
    assert ([one["id"] for one in rest["items"]], rest["next_cursor"]) == (ids[2:], None)
    assert client.get(f"{API}/migrator/migrations/{UUID(int=1)}/rehearsals", params={"limit": 1}).status_code == 404


def test_a_token_is_revoked_by_its_name_or_the_beginning_of_its_id(client: httpx.Client, service: Service) -> None:
    """A narrow terminal shows no more of it."""
    by_id, by_name = _token(client, "one"), _token(client, "two")
    at_home = ["--data-dir", str(service.settings.data_dir)]
    done = CliRunner().invoke(app, ["tokens", "revoke", by_id[:8], "--json", *at_home])
    assert (done.exit_code, done.output) == (0, ""), "as the API answers: with nothing"
    assert by_name in CliRunner().invoke(app, ["tokens", "revoke", "two", *at_home]).output
    assert client.get(f"{API}/tokens").json()["items"] == []
    assert CliRunner().invoke(app, ["tokens", "revoke", "two", *at_home]).exit_code == 1
