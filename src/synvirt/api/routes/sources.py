"""{base_url}/api/v1/migrator/sources: the registered live platforms, and their VMs.

Blocking functions (the store, the sealing) are `def`, and run in threads; those that connect to a platform are `async def`.
"""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import StringConstraints

from synvirt.api.document import problem_described
from synvirt.api.paging import PAGE_LIMIT, Cursor, Limit, cursor_of, number_of
from synvirt.api.received import documented, json_body
from synvirt.api.routing import Routes
from synvirt.api.tags import IfMatch, Tags
from synvirt.live import VmRow
from synvirt.migrations.sources.registered import Sources
from synvirt.model.machine import VmManifest
from synvirt.model.sources import Source, SourceChange, SourceRequest, SourceTest
from synvirt.model.values import Model

# A row has some 200 bytes: the VMs of a large vCenter fit into one answer.
VMS_LIMIT = 5000

# This many fit into a request's first line, in any form.
RECORDED_MAX = 20
VmText = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
VmId = Annotated[str, Path(min_length=1, max_length=1024)]


class JsonLines(PlainTextResponse):
    """An answer of JSON lines."""

    media_type = "application/jsonl"


class SourcePage(Model):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Source, ...]
    next_cursor: str | None


class SourceVmPage(Model):
    """By name. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[VmRow, ...]
    next_cursor: str | None


class KeyRotation(Model):
    """How many sources' credentials are sealed with the new key."""

    resealed: int


_SPOKEN_TO: dict[int | str, dict[str, Any]] = {
    502: problem_described("E_MIG_SOURCE_UNREACHABLE, E_MIG_AUTH_FAILED: the platform does not answer, or refuses our login")
}


def sources_router(sources: Sources) -> APIRouter:
    """The routes under /sources."""
    router = Routes(tags=["sources"])

    @router.post("/sources", status_code=201, response_model=Source, openapi_extra=documented(SourceRequest))
    def register_source(
        source: Annotated[SourceRequest, Depends(json_body(SourceRequest))], request: Request, response: Response
    ) -> Source:
        """Register a source. Its fields are checked, but nothing is connected to. The credentials are sealed and never
        shown."""
        registered = sources.add(source)
        response.headers["Location"] = f"{request.url.path}/{registered.id}"
        return registered

    @router.get("/sources", response_model=SourcePage)
    def list_sources(limit: Limit = PAGE_LIMIT, cursor: Cursor = None) -> SourcePage:
        """List the registered sources, newest first."""
        items, following = sources.page(limit=limit, cursor=number_of(cursor))
        return SourcePage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/sources/{source_id}", response_model=Source)
    def load_source(source_id: UUID, tags: Tags) -> Source:
        """Load one source."""
        return tags(*sources.stored(source_id))

    @router.patch("/sources/{source_id}", response_model=Source, openapi_extra=documented(SourceChange))
    def change_source(
        source_id: UUID, change: Annotated[SourceChange, Depends(json_body(SourceChange))], tags: IfMatch
    ) -> Source:
        """Change a source: rename it, pin its certificate, give it new credentials."""
        return sources.change(source_id, change, check=tags.check)

    @router.delete("/sources/{source_id}", status_code=204)
    def remove_source(source_id: UUID, tags: IfMatch) -> None:
        """Remove a source and its credentials. 409 while a job that has not ended reads from it."""
        sources.remove(source_id, check=tags.check)

    @router.post("/sources/{source_id}/test", response_model=SourceTest)
    async def test_source(
        source_id: UUID,
        deep: Annotated[
            bool, Query(description="Also take a snapshot, read from it (by each way that there is), and remove it")
        ] = False,
        vm_id: Annotated[str | None, Query(description="The VM to do that on", min_length=1, max_length=1024)] = None,
    ) -> SourceTest:
        """Probe connectivity: address, port, certificate, login, privileges. What fails is in `checks`, with a hint."""
        return await sources.test(source_id, deep=deep, vm_id=vm_id)

    @router.get("/sources/{source_id}/vms", response_model=SourceVmPage, responses=_SPOKEN_TO)
    async def discover_vms(
        source_id: UUID,
        limit: Annotated[int, Query(ge=1, le=VMS_LIMIT)] = VMS_LIMIT,
        cursor: Annotated[str | None, Query(description="`next_cursor` of a page")] = None,
        search: Annotated[str, Query(max_length=255, description="Part of a name or an id")] = "",
    ) -> SourceVmPage:
        """Discover the VMs on the source. The first page asks the platform; later pages are of the same moment, where they are
        asked for within a minute, and begin after the last VM of the page before in any case."""
        items, following = await sources.list_vms(source_id, limit=limit, cursor=cursor, search=search)
        return SourceVmPage(items=tuple(items), next_cursor=following)

    @router.get("/sources/{source_id}/vms/{vm_id}", response_model=VmManifest, responses=_SPOKEN_TO)
    async def inspect_vm(source_id: UUID, vm_id: VmId) -> VmManifest:
        """Inspect one VM of the source."""
        return await sources.inspect(source_id, vm_id)

    @router.post("/sources/{source_id}/record", response_class=JsonLines, responses=_SPOKEN_TO)
    async def record_source(
        source_id: UUID,
        vm_id: Annotated[
            list[VmText] | None, Query(description="A VM to inspect; else the first 50", max_length=RECORDED_MAX)
        ] = None,
    ) -> JsonLines:
        """Record what the control plane answers, as JSON lines without secrets, names and addresses, for tests to replay."""
        return JsonLines(await sources.record(source_id, vm_id or ()))

    @router.post("/keyring/rotate", response_model=KeyRotation)
    def rotate_key() -> KeyRotation:
        """Make a new key, and seal the credentials of all sources with it. The old key is gone once all are."""
        return KeyRotation(resealed=sources.rotate_key())

    return router
