"""{base_url}/api/v1/backup/peer/{offer}: a folder for another SynVirt's backups. `repository/peer_offer.py` executes its
requests, or refuses them; its account may call nothing else."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from synvirt.api.body import TOO_LITTLE, pieces
from synvirt.api.document import problem_described
from synvirt.api.problems import problem
from synvirt.api.routes.uploads import IDLE_S, Parting
from synvirt.api.routing import Routes
from synvirt.errors import BackupBadRequest, BackupBusy, BackupNotFound, SynvirtError
from synvirt.repository.peer import PeerEntries, PeerEntry, PeerRoom
from synvirt.repository.peer_offer import DAY_S, Offer
from synvirt.settings import Settings

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: problem_described("E_BAK_BAD_REQUEST: not a name of a repository's file, or not the bytes that belong to it"),
    404: problem_described("E_BAK_NOT_FOUND: no such folder is offered"),
    409: problem_described("E_BAK_CONFLICT, E_BAK_IMMUTABLE: the file exists with other content, or must be kept for longer"),
    429: problem_described("E_BAK_BUSY: too many files of this offer are being transferred"),
    502: problem_described("E_BAK_REPOSITORY_UNREACHABLE: the folder cannot be reached"),
}
_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_OFFSET_MAX = 1 << 40
# For one offer: a worker has a connection for each thread, and an offer several runs; each unread piece takes 1 MiB.
STREAMS_MAX = 64


def confined(settings: Settings, api_prefix: str) -> dict[str, tuple[str, ...]]:
    """The accounts that have an offered folder, and the paths of these folders."""
    found: dict[str, tuple[str, ...]] = {}
    for name, offer in settings.backup_offers.items():
        found[offer.user] = (*found.get(offer.user, ()), f"{api_prefix}/backup/peer/{name}")
    return found


class Streams:
    """Counts the files of one offer that are being sent or received. Only in the event loop."""

    def __init__(self) -> None:
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """BackupBusy, if there are too many already."""
        if self._count >= STREAMS_MAX:
            raise BackupBusy(f"{STREAMS_MAX} files of this offer are being transferred now", hint="try again in a moment")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class _Counted(StreamingResponse):
    """Counts while it is sent, until its end of any kind."""

    def __init__(self, streams: Streams, content: Iterator[bytes], size: int) -> None:
        super().__init__(content, media_type="application/octet-stream", headers={"Content-Length": str(size)})
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._streams.one():
                await super().__call__(scope, receive, send)
        except BackupBusy as error:
            await _busy(error)(scope, receive, send)


def _busy(error: BackupBusy) -> Response:
    answer = problem(error)
    answer.headers["Retry-After"] = "1"
    return answer


def peer_router(offers: Mapping[str, Offer], *, idle_s: float = IDLE_S) -> APIRouter:
    """The routes under /backup/peer/{offer}. `idle_s`: how long a request that sends nothing may last."""
    streams = {name: Streams() for name in offers}
    router = Routes(prefix="/backup/peer/{offer}", tags=["backup peer"], responses=_PROBLEMS)

    def named(offer: str) -> Offer:
        if offer not in offers:
            raise BackupNotFound(f"no folder {offer[:100]!r} is offered here")
        return offers[offer]

    @router.get("", response_model=PeerRoom)
    def offered_room(offer: str) -> PeerRoom:
        """How much room the offered folder has."""
        capacity, used = named(offer).room()
        return PeerRoom(capacity_bytes=capacity, used_bytes=used, keep_days=named(offer).keep_s / DAY_S)

    @router.post("/folders", status_code=204)
    def make_offered_folders(offer: str) -> None:
        """Make the folders of a repository. Idempotent."""
        named(offer).make_folders()

    @router.get("/entries", response_model=PeerEntries)
    def offered_entries(offer: str, folder: Annotated[str, Query(max_length=64)] = "") -> PeerEntries:
        """List one folder of a repository, or all that is there."""
        found = named(offer).entries(folder)
        return PeerEntries(
            entries=tuple(PeerEntry(name=one.name, size_bytes=one.size_bytes, modified_at=one.modified_at) for one in found)
        )

    @router.get("/files/{name:path}", response_class=Response, responses={200: _BYTES})
    def read_offered(
        offer: str,
        name: str,
        offset: Annotated[int, Query(ge=0, le=_OFFSET_MAX)] = 0,
        length: Annotated[int | None, Query(ge=0, le=_OFFSET_MAX)] = None,
    ) -> Response:
        """Read a file of a repository, from `offset` on; without `length` to its end."""
        size, pieces_of = named(offer).read(name, offset, length)
        return _Counted(streams[offer], pieces_of, size)

    @router.put("/files/{name:path}", status_code=204, openapi_extra={"requestBody": {"required": True} | _BYTES})
    async def put_offered(offer: str, name: str, request: Request) -> Response:
        """Store a file of a repository. The answer comes when it is complete, checked and durable; an interrupted upload leaves
        nothing."""
        try:
            kept = named(offer)
            with streams[offer].one():
                await _received(kept, name, request, idle_s)
        except BackupBusy as error:
            return Parting(_busy(error))
        except SynvirtError as error:
            return Parting(problem(error))
        return Response(status_code=204)

    @router.delete("/files/{name:path}", status_code=204)
    def delete_offered(offer: str, name: str) -> None:
        """Remove a file of a repository; 409 while it is kept, or needed by what is kept."""
        named(offer).delete(name)

    return router


async def _received(offer: Offer, name: str, request: Request, idle_s: float) -> None:
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) < 20):
        raise BackupBadRequest("the body's Content-Length is missing")
    receiving = await run_in_threadpool(offer.begin, name, int(length))
    try:
        async for piece in pieces(request.stream(), idle_s):
            await run_in_threadpool(receiving.feed, piece)
        await run_in_threadpool(receiving.finish)
    except ClientDisconnect as error:
        raise BackupBadRequest(f"the caller disconnected before {name} was complete") from error
    except TimeoutError as error:
        raise BackupBadRequest(f"{TOO_LITTLE} in {idle_s:.0f} s: {name} was aborted") from error
    finally:
        # In the event loop's own threads: at its end, which also cancels this, it waits for them.
        await asyncio.to_thread(receiving.discard)
