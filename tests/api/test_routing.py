"""A request costs the routers that may have its path, and no others."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from synvirt.api import problems
from synvirt.api.routing import Routes
from tests.fakes.service import Service


@pytest.mark.parametrize("base_url", ["/", "/kvm"])
def test_a_request_looks_through_the_routers_that_may_have_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    looked_through = set[int]()
    matches = APIRouter.matches

    def noted(self: APIRouter, scope: Any) -> Any:
        looked_through.add(id(self))
        return matches(self, scope)

    service = Service(tmp_path, base_url=base_url)
    monkeypatch.setattr(APIRouter, "matches", noted)
    at = base_url.rstrip("/")
    with service.served(), service.local() as client:
        for path in ("/api/v1/audit", "/api/v1/backup/jobs", "/api/v1/waves", "/api/v1/migrator/hosts", "/jobs"):
            looked_through.clear()
            client.get(f"http://x{at}{path}")
            # The page's root and the router in another router may have every path.
            assert 0 < len(looked_through) <= 6, path
    service.close()


@pytest.mark.parametrize("at", [None, "/at"])
def test_all_of_its_routes_are_found_and_other_methods_refused(at: str | None) -> None:
    inner, outer = Routes(prefix="/inner"), Routes(at=at)
    for router, paths in ((inner, ("", "/{one}/more")), (outer, ("/", "/plain", "/by-{name}/last", "/{any}/deep/{more:path}"))):
        for path in paths:
            router.add_api_route(path, lambda: "found", methods=["GET"])
    outer.include_router(inner)
    app = FastAPI()
    app.include_router(outer, prefix="/at")
    found = ("/", "/plain", "/by-me/last", "/x/deep/y/z", "/inner", "/inner/1/more", "/in%6eer")
    wanted = {(method, f"/at{path}"): status for path in found for method, status in (("GET", 200), ("POST", 405))}
    wanted |= {("GET", path): 404 for path in ("/at/other", "/at/inner/1", "/plain", "/inner", "/x/at/plain")}

    async def answers() -> dict[tuple[str, str], int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return {each: (await client.request(*each)).status_code for each in wanted}

    assert asyncio.run(answers()) == wanted


def test_what_is_not_served_is_refused_without_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second of a processor to make."""
    service = Service(tmp_path, has_pages=False)
    monkeypatch.setattr(service.app, "openapi", None)
    with service.served(), service.local() as client:
        assert client.get("http://x/api/v1/nothing").status_code == 404
        refused = client.delete("http://x/api/v1/audit")
        assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD")
        # The templates of the paths are compiled by the first: all of them take longer than the answer.
        monkeypatch.setattr(problems, "compile_path", None)
        assert client.get("http://x/api/v1/other").status_code == 404
        assert client.delete("http://x/api/v1/audit").status_code == 405
    service.close()


@pytest.mark.parametrize("base_url", ["/", "/kvm"])
def test_what_is_of_the_whole_service_is_under_the_migrator_too(tmp_path: Path, base_url: str) -> None:
    """With the roles and the entries in the audit trail of its own path."""
    service, at = Service(tmp_path, base_url=base_url, has_pages=False, tls=False), base_url.rstrip("/")
    own, second = f"http://x{at}/api/v1", f"http://x{at}/api/v1/migrator"
    with service.served() as server, service.local() as client:
        token = client.post(f"{second}/tokens", json={"name": "ci", "role": "viewer"})
        assert token.status_code == 201
        assert token.headers["location"] == f"{at}/api/v1/tokens/{token.json()['id']}"
        for path in ("/tokens", "/audit", "/audit/verify", "/audit?limit=1", "/waves", "/waves/nosuch"):
            assert client.get(f"{second}{path}").json() == client.get(f"{own}{path}").json(), path
        (entry,) = client.get(f"{own}/audit").json()["items"]
        assert entry["resource"] == f"{at}/api/v1/tokens"
        assert client.get(f"{second}/audit?nosuch=1").status_code == 400
        for path in ("/tokensx", "/backup/jobs", "/migrator/tokens"):
            assert client.get(f"{second}{path}").status_code == 404, path
        viewer = {"Authorization": f"Bearer {token.json()['secret']}"}
        for path, status in (("migrations", 200), ("waves", 200), ("tokens", 403), ("audit", 403), ("audit/verify", 403)):
            url = httpx.URL(server.address).copy_with(path=f"{at}/api/v1/migrator/{path}")
            assert httpx.get(url, headers=viewer, timeout=60).status_code == status, path
    service.close()
