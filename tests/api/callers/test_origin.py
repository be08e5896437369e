"""Which requests another site's page makes."""

import asyncio
from typing import Any

import pytest

from synvirt.api.callers.origin import SameOrigin


def status_of(headers: dict[str, str]) -> int:
    """The status of a request that may change something; 200: the app is asked."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    raw = [(name.encode(), value.encode()) for name, value in {"host": "kvm1:8443", **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/migrator/migrations", "query_string": b"", "headers": raw}
    asyncio.run(SameOrigin(app)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "https://KVM1:8443"}, 200),
        ({"origin": "https://elsewhere"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://["}, 403),
        ({"origin": "https://elsewhere", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
    ],
)
def test_a_request_of_another_sites_page_is_refused(headers: dict[str, str], status: int) -> None:
    assert status_of(headers) == status
