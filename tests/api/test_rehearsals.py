"""What a request to rehearse answers; what happens then is in tests/rehearsals."""

import asyncio
from typing import cast
from uuid import UUID, uuid4

import httpx
import pytest
from fastapi import FastAPI

from synvirt.api.routes.rehearsals import rehearsals_router
from synvirt.model.rehearsal import Rehearsal, RehearsalRequest
from synvirt.model.values import now
from synvirt.rehearsals.asking import Rehearsing


class Asked:
    def ask(self, job_id: UUID, request: RehearsalRequest) -> Rehearsal:
        return Rehearsal(id=uuid4(), migration_id=job_id, created_at=now())


@pytest.mark.parametrize("path", ["rehearsals", "rehearse"])
def test_a_rehearsal_that_is_begun_has_a_place(path: str) -> None:
    """By the path of the list; and by the one of earlier versions."""
    app = FastAPI()
    app.include_router(rehearsals_router(cast("Rehearsing", Asked())), prefix="/virt/api/v1/migrator")
    job = f"/virt/api/v1/migrator/migrations/{uuid4()}"

    async def begun() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://synvirt") as client:
            return await client.post(f"{job}/{path}")

    accepted = asyncio.run(begun())
    assert accepted.status_code == 202
    assert accepted.headers["location"] == f"{job}/rehearsals/{accepted.json()['id']}"
