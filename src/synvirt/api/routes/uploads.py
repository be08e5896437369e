"""{base_url}/api/v1/migrator/uploads: sends, lists, loads, removes and inspects archives."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from synvirt.api.body import TOO_LITTLE, pieces
from synvirt.api.document import problem_described
from synvirt.api.multipart import UploadForm, refuse_length
from synvirt.api.paging import PAGE_LIMIT, Cursor, Limit, cursor_of, number_of
from synvirt.api.problems import problem
from synvirt.api.received import documented, optional_json_body
from synvirt.api.routing import Routes
from synvirt.errors import BadRequest, SynvirtError, UploadRejected, UploadTooLarge
from synvirt.jobs.inspecting.looking import Looking
from synvirt.migrations.uploads import Uploads
from synvirt.model.files import Inspection, Upload, UploadInspectRequest
from synvirt.model.values import Bytes, Model
from synvirt.offline import browsing
from synvirt.sizes import MIB

# A caller without a network sends nothing more; what it began must not stay forever.
IDLE_S = 60.0
# How long, and how much, a refused caller may go on sending: closing a connection with unread bytes can discard the answer (RFC
# 9112 9.6). A caller that sends more is stopped: it would send gigabytes in that time.
LINGER_S = 2.0
LINGER_BYTES = MIB

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "sha256": {
                            "type": "string",
                            "pattern": "^[0-9a-fA-F]{64}$",
                            "description": "Checked against the file; may come before or after it",
                        },
                    },
                }
            }
        },
    }
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    UploadTooLarge.status: problem_described(
        "E_MIG_UPLOAD_REJECTED: larger than the limit, or than the free space of the host"
    ),
    UploadRejected.status: problem_described("E_MIG_UPLOAD_REJECTED: the file's SHA-256 is not the announced one"),
}


class UploadLimits(Model):
    """`limit_bytes`: of any upload. `free_bytes`: what all uploads may still take of the host's disk. `refused`: why a file of
    the asked size cannot be uploaded, and `hint`: what to do about it; null, if it can."""

    limit_bytes: Bytes
    free_bytes: Bytes
    refused: str | None = None
    hint: str | None = None


class UploadPage(Model):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Upload, ...]
    next_cursor: str | None


def uploads_router(
    uploads: Uploads, *, idle_s: float = IDLE_S, free_bytes: Callable[[], int] | None = None, looking: Looking = browsing
) -> APIRouter:
    """`free_bytes`: the destination's, to check whether a VM fits. `looking`: inspects files."""
    router = Routes(prefix="/uploads", tags=["uploads"])

    @router.post("", status_code=201, response_model=Upload, openapi_extra=_BODY, responses=_REFUSALS)
    async def upload(request: Request, response: Response) -> Upload | Response:
        """Upload one archive. It is listed once it is whole, checked and durable; a broken upload leaves nothing."""
        try:
            made = await received(request, uploads, idle_s)
        except SynvirtError as error:
            return Parting(problem(error))
        response.headers["Location"] = f"{request.url.path}/{made.id}"
        return made

    @router.get("", response_model=UploadPage)
    def list_uploads(
        limit: Limit = PAGE_LIMIT,
        cursor: Cursor = None,
    ) -> UploadPage:
        """List the uploads, newest first."""
        items, following = uploads.page(limit=limit, cursor=number_of(cursor))
        return UploadPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/{upload_id}", response_model=Upload)
    def load_upload(upload_id: UUID) -> Upload:
        """Load one upload."""
        return uploads.get(upload_id)

    @router.delete("/{upload_id}", status_code=204)
    def remove_upload(upload_id: UUID) -> None:
        """Remove an upload. 409 while a job that has not ended reads it."""
        uploads.remove(upload_id)

    @router.post(
        "/{upload_id}/inspect", response_model=Inspection, openapi_extra=documented(UploadInspectRequest, required=False)
    )
    def inspect_upload(
        upload_id: UUID, choice: Annotated[UploadInspectRequest, Depends(optional_json_body(UploadInspectRequest))]
    ) -> Inspection:
        """Inspect an upload: its kind, and the VM in it."""
        return looking.inspect(uploads.import_root, uploads.get(upload_id).path, vm=choice.vm, free_bytes=free_bytes)

    beside = Routes(tags=["uploads"])
    beside.include_router(router)

    @beside.get("/upload-limits", response_model=UploadLimits)
    def limits(size_bytes: Annotated[int | None, Query(ge=0, le=(1 << 63) - 1)] = None) -> UploadLimits:
        """How large an upload may be here, and why one of `size_bytes` would be refused: ask before you send it."""
        refusal = uploads.refusal_of(size_bytes or 0)
        return UploadLimits(
            limit_bytes=uploads.cap_bytes,
            free_bytes=uploads.free_bytes(),
            refused=None if refusal is None else refusal.detail,
            hint=None if refusal is None else refusal.hint,
        )

    return beside


async def received(request: Request, uploads: Uploads, idle_s: float, *, blank_sha256: bool = False) -> Upload:
    """The one file of a multipart body, complete and listed; nothing is left of a refused or interrupted body.

    `blank_sha256`: a browser's form also sends an empty field."""
    length = refuse_length(request.headers.get("content-length"), uploads.cap_bytes)
    await run_in_threadpool(uploads.check_room, length)
    form = UploadForm(
        request.headers.get("content-type", ""),
        cap_bytes=uploads.cap_bytes,
        begin=uploads.begin,
        blank_sha256=blank_sha256,
    )
    try:
        async for piece in pieces(request.stream(), idle_s):
            await run_in_threadpool(form.feed, piece)
        return await run_in_threadpool(form.finish)
    except ClientDisconnect as error:
        raise BadRequest("the caller disconnected before the upload was complete") from error
    except TimeoutError as error:
        raise BadRequest(f"{TOO_LITTLE} in {idle_s:.0f} s: the upload was aborted", hint="send the file again") from error
    finally:
        # In the event loop's own threads: at its end it waits for them. It also cancels this, maybe twice, and a thread's work
        # that has not begun would be cancelled with it.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, form.discard))


class Parting(Response):
    """A refusal that does not wait for the rest of twenty gigabytes, but also reaches callers that read it only after sending.

    The answer is sent at once; what still arrives is dropped for a moment, and then the connection is closed.
    """

    def __init__(self, refusal: Response) -> None:
        super().__init__(refusal.body, refusal.status_code, dict(refusal.headers) | {"Connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep_open(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await super().__call__(scope, receive, keep_open)
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                dropped = 0
                while dropped < LINGER_BYTES:
                    message = await receive()
                    if not message.get("more_body", False):
                        break
                    dropped += len(message.get("body", b""))
                else:
                    # Nothing more is read, but the answer is sent: the caller has time to read it.
                    await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b""})
