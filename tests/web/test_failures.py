"""What a browser gets for an error that no page of ours raised: a page, in the same look, and never JSON."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.service import Service, every_role

# What browsers send for an address that a person typed.
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
BASE = "/kvm"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    folder: Path = tmp_path_factory.mktemp("failures")
    accounts = every_role(folder / "users", "secret")
    made = Service(folder, check_password=accounts, role_of=accounts.role_of, base_url=BASE)

    @made.app.get(f"{BASE}/broken")
    def broken() -> None:
        raise RuntimeError("a path of this host: /etc/secret")

    with made.served() as server:
        yield made, server.address
    made.close()


def _asked(address: str, method: str, path: str, *, account: str = "viewer", **headers: str) -> httpx.Response:
    known = {"Authorization": "Basic " + base64.b64encode(f"{account}:secret".encode()).decode()}
    return httpx.request(method, f"{address}{path}", headers=known | headers, verify=False, timeout=60)


FAILURES: list[tuple[str, str, dict[str, str], int, str]] = [
    ("GET", f"{BASE}/nowhere/at/all", {}, 404, f"there is no page at {BASE}/nowhere/at/all"),
    ("GET", "/elsewhere", {}, 404, "there is no page at /elsewhere"),
    ("GET", f"{BASE}/logout", {}, 405, "Method Not Allowed"),
    ("GET", f"{BASE}/audit", {}, 403, "this needs the role admin, and viewer has the role viewer"),
    ("POST", f"{BASE}/logout", {"Sec-Fetch-Site": "cross-site"}, 403, "from another site&#39;s page"),
    ("GET", f"{BASE}/broken", {}, 500, "the service&#39;s log has it as incident"),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "reported"), FAILURES)
def test_a_browser_gets_a_page(
    service: tuple[Service, str], method: str, path: str, headers: dict[str, str], status: int, reported: str
) -> None:
    answer = _asked(service[1], method, path, **BROWSER, **headers)
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "text/html; charset=utf-8")
    assert reported in answer.text
    assert f'<a href="{BASE}/">All migrations</a>' in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "/etc/secret" not in answer.text
    if status == 405:
        assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(("method", "path", "headers", "status", "reported"), FAILURES)
def test_a_program_gets_a_problem(
    service: tuple[Service, str], method: str, path: str, headers: dict[str, str], status: int, reported: str
) -> None:
    answer = _asked(service[1], method, path, **headers)
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json")
    assert body["status"] == status


@pytest.mark.parametrize("path", ["migrator/nowhere", "migrator/migrations/x", "backup/jobs/x", "nowhere"])
def test_the_api_answers_a_browser_as_everyone(service: tuple[Service, str], path: str) -> None:
    answer = _asked(service[1], "GET", f"{BASE}/api/v1/{path}", **BROWSER)
    assert (answer.status_code, answer.headers["Content-Type"]) == (404, "application/problem+json")


def test_a_refusal_links_only_pages_that_the_account_may_see(service: tuple[Service, str]) -> None:
    answer = _asked(service[1], "GET", f"{BASE}/audit", **BROWSER)
    assert f'href="{BASE}/sources"' in answer.text
    assert f'href="{BASE}/audit"' not in answer.text


@pytest.mark.parametrize("path", ["/audit", "/sources", "/uploads", "/"])
def test_a_page_number_beyond_all_is_refused(service: tuple[Service, str], path: str) -> None:
    """None that the store could not be asked for."""
    answer = _asked(service[1], "GET", f"{BASE}{path}?cursor={'9' * 19}", account="admin", **BROWSER)
    assert answer.status_code == 400
