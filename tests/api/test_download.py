"""Files of the service as answers: ranges, those that they do not have, and ETags."""

import asyncio
from pathlib import Path

import httpx
import pytest

from synvirt.api.download import Download

CONTENT = bytes(range(100))


def got(tmp_path: Path, headers: dict[str, str]) -> httpx.Response:
    if not (tmp_path / "file").exists():  # else it has another ETag
        (tmp_path / "file").write_bytes(CONTENT)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Download(tmp_path / "file", media_type="application/x-tar"))
        async with httpx.AsyncClient(transport=transport, base_url="http://synvirt") as client:
            return await client.get("/receipt", headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("asked", "content"), [("bytes=0-0", CONTENT[:1]), ("bytes=-5", CONTENT[-5:]), ("bytes=90-", CONTENT[90:])]
)
def test_a_range(tmp_path: Path, asked: str, content: bytes) -> None:
    answer = got(tmp_path, {"Range": asked})
    assert (answer.status_code, answer.content) == (206, content)


@pytest.mark.parametrize(("asked", "status"), [("bytes=100-", 416), ("bytes=5-2", 400), ("lines=1-2", 400), ("bytes", 400)])
def test_a_range_that_the_file_does_not_have_is_a_problem(tmp_path: Path, asked: str, status: int) -> None:
    answer = got(tmp_path, {"Range": asked})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert (answer.json()["status"], answer.json()["code"]) == (status, "E_MIG_BAD_REQUEST")
    assert asked in answer.json()["detail"]
    assert answer.headers.get("content-range") == ("bytes */100" if status == 416 else None)


def test_what_the_caller_has_is_not_sent_again(tmp_path: Path) -> None:
    tag = got(tmp_path, {}).headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = got(tmp_path, {"If-None-Match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert got(tmp_path, {"If-None-Match": '"other"'}).content == CONTENT
