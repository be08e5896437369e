"""The page of the import root."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from fastapi import FastAPI

from synvirt.model.files import HostEntry, HostFolder
from synvirt.model.values import now
from synvirt.web.new import new_router
from synvirt.web.pages import Pages


def test_the_files_of_strangers_are_opened_by_the_looker_alone(tmp_path: Path) -> None:
    """As the API does: the page shows what a confined process found, and the service itself opens nothing."""
    asked: list[tuple[Path, str]] = []

    def browse(root: Path, path: str = "", *, limit: int, cursor: str | None = None) -> HostFolder:
        asked.append((root, path))
        entry = HostEntry(name="web.ova", path="/x/web.ova", type="file", size_bytes=1, modified_at=now(), offline_kind=None)
        return HostFolder(path="/x", parent=None, entries=(entry,), next_cursor=None)

    nothing, app = cast(Any, None), FastAPI()
    looking = cast(Any, SimpleNamespace(browse=browse))
    app.include_router(new_router(Pages(""), nothing, nothing, import_root=tmp_path, looking=looking))

    async def page() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as browser:
            return await browser.get("/new/files", params={"path": "folder"})

    with ThreadPoolExecutor(1) as beside_the_browser:  # whose driver has an event loop in this thread
        answer = beside_the_browser.submit(asyncio.run, page()).result()
    assert "web.ova" in answer.text
    assert asked == [(tmp_path, "folder")]
