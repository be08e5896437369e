"""POST /remote-files/inspect, and plans with a URL: what callers get, and what nobody ever gets."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.service import Service
from tests.offline import appliances
from tests.running.ports import free_port
from tests.servers import remote_servers as servers


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        appliances.archive(server.folder / "winsrv.ova", appliances.appliance())
        yield server


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    made = Service(tmp_path, has_pages=False, remote_allowed_hosts="127.0.0.1")
    with made.served(), made.local() as client:
        yield client
    made.close()


def asked(nginx: servers.Nginx, **changes: object) -> dict[str, object]:
    credentials = {"username": servers.USER, "password": servers.PASSWORD}
    options = {"fingerprint_sha256": nginx.certificates.fingerprint}
    return {
        "url": f"https://127.0.0.1:{nginx.tls_port}/private/winsrv.ova",
        "credentials": credentials,
        "options": options,
        **changes,
    }


def test_what_is_in_a_file_elsewhere(client: httpx.Client, nginx: servers.Nginx) -> None:
    answer = client.post("/remote-files/inspect", json=asked(nginx))
    assert answer.status_code == 200, answer.text
    assert answer.json()["offline_kind"] == "ova_archive"
    assert [disk["key"] for disk in answer.json()["manifest"]["disks"]] == ["vmdisk1", "vmdisk2"]
    assert servers.PASSWORD not in answer.text


def test_the_user_may_be_called_as_sources_call_it(client: httpx.Client, nginx: servers.Nginx) -> None:
    named = asked(nginx, credentials={"user": servers.USER, "password": servers.PASSWORD})
    assert client.post("/remote-files/inspect", json=named).status_code == 200
    both = asked(nginx, credentials={"user": "x", "username": servers.USER, "password": servers.PASSWORD})
    assert "has no user" in client.post("/remote-files/inspect", json=both).text


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"credentials": {"username": servers.USER, "password": "hush-1"}}, 502, "E_MIG_AUTH_FAILED"),
        ({"credentials": {"pin": "hush-1"}}, 400, "E_MIG_BAD_REQUEST"),
        ({"credentials": {"password": 5}}, 400, "E_MIG_BAD_REQUEST"),
        ({"options": {}}, 502, "E_MIG_AUTH_FAILED"),  # a certificate that nobody knows
        ({"options": {"fingerprint": "x"}}, 400, "E_MIG_BAD_REQUEST"),
        ({"url": "https://192.0.2.1/hush-1.ova"}, 400, "E_MIG_BAD_REQUEST"),
        ({"url": "https://user:hush-1@192.0.2.7/x"}, 400, "E_MIG_BAD_REQUEST"),
        ({"url": "file:///etc/passwd"}, 400, "E_MIG_BAD_REQUEST"),
        ({"url": "gopher://127.0.0.1/x"}, 400, "E_MIG_BAD_REQUEST"),
        ({"url": 5}, 400, "E_MIG_BAD_REQUEST"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, nginx: servers.Nginx, changes: dict[str, object], status: int, code: str
) -> None:
    answer = client.post("/remote-files/inspect", json=asked(nginx, **changes))
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert ":hush-1" not in answer.text
    assert '"hush-1"' not in answer.text


def test_not_there_and_not_listening(client: httpx.Client, nginx: servers.Nginx) -> None:
    gone = client.post("/remote-files/inspect", json={"url": f"{nginx.url}gone.ova?signed=hush-1"})
    assert (gone.status_code, gone.json()["code"]) == (404, "E_MIG_NOT_FOUND")
    assert "hush-1" not in gone.text
    away = client.post("/remote-files/inspect", json={"url": f"http://127.0.0.1:{free_port()}/x.ova"})
    assert (away.status_code, away.json()["code"]) == (502, "E_MIG_SOURCE_UNREACHABLE")
    ranges = client.post("/remote-files/inspect", json={"url": nginx.url.replace("/open/", "/whole/") + "winsrv.ova"})
    assert (ranges.status_code, ranges.json()["code"]) == (400, "E_MIG_UNSUPPORTED_FORMAT")


def test_a_job_shows_the_url_without_its_secrets(client: httpx.Client, nginx: servers.Nginx) -> None:
    ref = asked(nginx, kind="remote_url", url=f"{nginx.url}winsrv.ova?signed=hush-1")
    plan = {"source": {"Offline": "ova_archive"}, "source_ref": ref, "mode": "Cold"}
    answer = client.post("/migrations", json={"plan": plan})
    assert answer.status_code == 201, answer.text
    shown = answer.json()["plan"]["source_ref"]
    assert (shown["kind"], shown["url"], shown["credentials"]) == ("remote_url", f"{nginx.url}winsrv.ova", {})
    for text in (
        answer.text,
        client.get("/migrations").text,
        client.get(answer.headers["location"].rpartition("migrator")[2]).text,
    ):
        assert "hush-1" not in text
        assert servers.PASSWORD not in text


def test_a_live_plan_takes_no_url(client: httpx.Client, nginx: servers.Nginx) -> None:
    ref = asked(nginx, kind="remote_url")
    answer = client.post("/migrations", json={"plan": {"source": {"Live": "vim_api"}, "source_ref": ref, "mode": "Cold"}})
    assert (answer.status_code, answer.json()["code"]) == (400, "E_MIG_INVALID_PLAN")
    assert servers.PASSWORD not in answer.text
