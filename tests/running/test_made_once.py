"""What tests share leaves nothing of one test to the next."""

import asyncio
import gc
import os
import weakref
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.dependencies import utils

from synvirt.doctor import finding
from tests.fakes.service import Service
from tests.needs import need_libvirt
from tests.servers.libvirt_capabilities import EMULATORS, kept_for


def test_a_service_that_is_closed_stays_in_no_memory(tmp_path: Path) -> None:
    """Its routes with all that they reach: 27,000 objects, which a worker would have for each of a thousand tests."""
    # What an earlier test left is finalized now: a warning of that, raised while the service is made, would keep the service.
    gc.collect()
    service = Service(tmp_path)
    with service.served(), service.local() as client:
        assert client.get("/migrations").status_code == 200
    service.close()
    left = weakref.ref(service.app)
    del service
    gc.collect()
    assert left() is None


def test_each_service_answers_by_itself_and_each_after_the_first_one_reads_no_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        services.append(Service(tmp_path / name))
        monkeypatch.setattr(utils, "analyze_param", None)
    services[0].submit()
    for service, jobs in zip(services, (1, 0), strict=True):
        with service.served(), service.local() as client:
            assert len(client.get("/migrations").json()["items"]) == jobs
        service.close()


def test_functions_of_one_code_keep_what_differs() -> None:
    def app(least: int, default: int, gives: str, depends: Any) -> FastAPI:
        router = APIRouter()

        @router.get("/at/{place}")
        def at(
            place: int, by: Annotated[str, Depends(depends)], number: Annotated[int, Query(ge=least)] = default
        ) -> list[object]:
            return [gives, by, place, number]

        made = FastAPI()
        made.include_router(router)
        return made

    async def answers(made: FastAPI) -> tuple[object, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://test") as client:
            return (await client.get("/at/1")).json(), (await client.get("/at/1?number=3")).status_code

    one, other = app(1, 11, "one", lambda: "by one"), app(5, 15, "other", lambda: "by other")
    assert asyncio.run(answers(one)) == (["one", "by one", 1, 11], 200)
    assert asyncio.run(answers(other)) == (["other", "by other", 1, 15], 422)


def test_what_a_task_returns_is_not_written_out() -> None:
    written: list[object] = []

    class Vast:
        def __repr__(self) -> str:
            written.append(self)
            return "vast"

    async def made() -> Vast:
        return Vast()

    asyncio.run(made())
    assert written == []


def test_answers_about_qemu_are_asked_again_once_its_inode_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libvirt asks again then, in each folder that it finds old answers in."""
    need_libvirt()
    program = tmp_path / EMULATORS[0]
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = kept_for(0)
    assert kept_for(0) == before
    (tmp_path / "linked").hardlink_to(program)
    assert kept_for(0) != before


def test_a_program_that_is_another_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program, asked = tmp_path / "tool", tmp_path / "asked"
    for version in ("1", "2"):
        made = tmp_path / "made"
        made.write_text(f"#!/bin/sh\necho asked >> {asked}\necho {version}\n")
        made.chmod(0o755)
        made.rename(program)
        assert [finding.first_line(["tool", "--version"]) for _ in range(2)] == [version] * 2
    assert asked.read_text() == "asked\n" * 2
