"""Entity tags: whoever changes what another has changed since is refused, by every route that changes a document."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.backup.conftest import served_guest
from tests.api.test_sources import VIM
from tests.api.test_waves import body as wave
from tests.api.test_windows import NIGHT
from tests.fakes.backups import ended
from tests.fakes.service import Service

MIGRATOR, BACKUP, WAVES = "/api/v1/migrator", "/api/v1/backup", "/api/v1/waves"
Changes = tuple[str, list[dict[str, Any]]]


@pytest.fixture
def service(tmp_path: Path, database_url: str) -> Iterator[Service]:
    with served_guest(tmp_path, bytes(4096), database_url=database_url, has_pages=False) as made:
        yield made


@pytest.fixture
def client(client: httpx.Client) -> httpx.Client:
    client.base_url = httpx.URL("http://synvirt")
    return client


def added(client: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code in (201, 202), answer.text
    made: dict[str, Any] = answer.json()
    return made


def a_window(client: httpx.Client, _: Service) -> Changes:
    path = f"{MIGRATOR}/windows/{added(client, f'{MIGRATOR}/windows', NIGHT)['id']}"
    return path, [NIGHT | {"name": name} for name in ("first", "second", "third")]


def a_source(client: httpx.Client, _: Service) -> Changes:
    path = f"{MIGRATOR}/sources/{added(client, f'{MIGRATOR}/sources', VIM)['id']}"
    # The credentials are in no answer, and another's are not to be lost either.
    return path, [{"credentials": {"user": "root", "password": word}} for word in ("one", "two", "three")]


def a_wave(client: httpx.Client, _: Service) -> Changes:
    path = f"{WAVES}/{added(client, WAVES, wave('a'))['id']}"
    # Only the members differ.
    return path, [wave("a", "b"), wave("a", "c"), wave("a", "d")]


def a_repository(client: httpx.Client, service: Service) -> Changes:
    where = {"name": "here", "kind": "local", "path": str(service.settings.data_dir.parent / "repository")}
    path = f"{BACKUP}/repositories/{added(client, f'{BACKUP}/repositories', where)['id']}"
    return path, [{"name": name} for name in ("first", "second", "third")]


def a_backup_job(client: httpx.Client, service: Service) -> Changes:
    path, _ = a_repository(client, service)
    repository_id = path.rpartition("/")[2]
    asked = {"name": "nightly", "vm_ids": ["web"], "repository_id": repository_id, "schedule": "0 2 * * *"}
    path = f"{BACKUP}/jobs/{added(client, f'{BACKUP}/jobs', asked)['id']}"
    return path, [{"quiesce": "off"}, {"quiesce": "require"}, {"name": "weekly"}]


def a_restore_point(client: httpx.Client, service: Service) -> Changes:
    job, _ = a_backup_job(client, service)
    run = added(client, f"{job}/run", {})
    ended(service.backups, run["id"])
    point = client.get(f"{BACKUP}/restore-points").json()["items"][0]
    return f"{BACKUP}/restore-points/{point['id']}", [{"protected": True}, {"protected": False}, {"protected": True}]


ROUTES: Mapping[str, Callable[[httpx.Client, Service], Changes]] = {
    f"PUT {MIGRATOR}/windows/{{window_id}}": a_window,
    f"PATCH {MIGRATOR}/sources/{{source_id}}": a_source,
    f"PUT {WAVES}/{{wave_id}}": a_wave,
    f"PATCH {BACKUP}/repositories/{{repository_id}}": a_repository,
    f"PATCH {BACKUP}/jobs/{{job_id}}": a_backup_job,
    f"PATCH {BACKUP}/restore-points/{{point_id}}": a_restore_point,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("route", ROUTES)
def test_a_change_of_an_earlier_state_is_refused(route: str, client: httpx.Client, service: Service) -> None:
    method, (path, (first, second, third)) = route.split(maxsplit=1)[0], ROUTES[route](client, service)

    def changed(change: Any, *tags: str) -> int:
        answer = client.request(method, path, json=change, headers=[("If-Match", tag) for tag in tags])
        if answer.status_code == 412:
            found, code = answer.json(), "E_BAK_CONFLICT" if BACKUP in path else "E_MIG_CONFLICT"
            assert answer.headers["content-type"] == "application/problem+json"
            assert (found["code"], found["status"], "load it again" in found["hint"]) == (code, 412, True)
        return answer.status_code

    def tag() -> str:
        return client.get(path).headers["ETag"]

    def document() -> Any:
        """Without the room of a repository's disk, which others use."""
        return client.get(path).json() | {"used_bytes": None}

    before = tag()
    assert before == tag() == client.head(path).headers["ETag"]
    assert (before[0], before[-1]) == ('"', '"')  # a weak one begins with W/
    assert changed(first, before) == 200
    assert tag() != before
    theirs, now = document(), tag()
    for earlier in (before, f"W/{now}", now.strip('"'), ""):
        assert changed(second, earlier) == 412
    assert (document(), tag()) == (theirs, now)
    assert changed(second, f"{before}, {now}") == 200
    # Of several that were made from the same state, one counts.
    same = tag()
    with ThreadPoolExecutor(4) as callers:
        answers = sorted(callers.map(lambda _: changed(third, same), range(4)))
    assert answers.count(200) == 1
    assert set(answers) <= {200, 409, 412}  # 409: a repository is being changed
    assert changed(first) == changed(second, "*") == changed(third, before, tag()) == 200


@pytest.mark.timeout(60)
@pytest.mark.parametrize("route", ROUTES)
def test_what_was_changed_is_not_removed_by_who_saw_it_before(route: str, client: httpx.Client, service: Service) -> None:
    method, (path, (first, second, _)) = route.split(maxsplit=1)[0], ROUTES[route](client, service)
    assert client.request(method, path, json=first).status_code == 200
    before = client.get(path).headers["ETag"]
    assert client.request(method, path, json=second).status_code == 200
    now = client.get(path).headers["ETag"]
    for earlier in (before, f"W/{now}"):
        assert client.delete(path, headers={"If-Match": earlier}).status_code == 412
    assert client.get(path).headers["ETag"] == now
    assert client.delete(path, headers={"If-Match": f"{before}, {now}"}).status_code == 204
    assert client.get(path).status_code == 404


def test_an_export_has_the_tag_of_its_wave(client: httpx.Client, service: Service) -> None:
    path, (first, *_) = a_wave(client, service)
    for way in ("json", "csv"):
        exported = client.get(f"{path}/export", params={"format": way})
        assert exported.headers["ETag"] == client.get(path).headers["ETag"]
    asked = client.get(f"{path}/export").json()
    assert asked["etag"] == exported.headers["ETag"]
    assert client.put(path, json=asked).status_code == 200  # as it was
    assert client.put(path, json=first).status_code == 200
    refused = client.put(path, json=asked)
    assert (refused.status_code, "without `etag`" in refused.json()["hint"]) == (412, True)
    # A new wave is made from none.
    assert client.post(WAVES, json=asked).status_code == 201
    assert client.post(f"{WAVES}/import", json=asked).status_code == 200


def test_every_route_that_changes_a_document_takes_its_tag(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()["paths"]
    for path, operations in document.items():
        if "ETag" in operations.get("get", {}).get("responses", {}).get("200", {}).get("headers", {}):
            taken = [one["name"] for one in operations.get("delete", {}).get("parameters", ()) if one["in"] == "header"]
            assert "delete" not in operations or taken == ["If-Match"], path
    changing = {
        f"{method.upper()} {path}": operation
        for path, operations in document.items()
        for method, operation in operations.items()
        if method in ("put", "patch") and "application/json" in operation["requestBody"]["content"]
    }
    assert set(changing) == set(ROUTES)
    for route, operation in changing.items():
        assert "If-Match" in [one["name"] for one in operation["parameters"] if one["in"] == "header"], route
        assert "application/problem+json" in operation["responses"]["412"]["content"]
        assert "ETag" in document[route.split()[1]]["get"]["responses"]["200"]["headers"]
