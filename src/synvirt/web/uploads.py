"""{base_url}/uploads: archives that were sent here: send, see, import, remove.

A plain form can send a file as well as upload.js; the script adds the progress, which a browser does not show.
"""

from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from synvirt.api.paging import Cursor, number_of
from synvirt.api.routes.uploads import IDLE_S, Parting, received
from synvirt.errors import SynvirtError
from synvirt.migrations.uploads import Uploads
from synvirt.web.pages import Pages

ON_A_PAGE = 100


def uploads_router(pages: Pages, uploads: Uploads, *, idle_s: float = IDLE_S) -> APIRouter:
    """The pages of uploads. `idle_s`: how long a request that sends nothing may last."""
    router = pages.router()

    @router.get("/uploads")
    def listed(cursor: Cursor = None) -> Response:
        items, following = uploads.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        return pages.page("uploads.html", uploads=items, following=following, cursor=cursor, cap_bytes=uploads.cap_bytes)

    @router.post("/uploads")
    async def upload(request: Request) -> Response:
        try:
            made = await received(request, uploads, idle_s, blank_sha256=True)
        except SynvirtError as error:
            return Parting(await run_in_threadpool(pages.failure, error))
        return RedirectResponse(f"{pages.root}/new/machine?kind=upload&upload_id={made.id}", status_code=303)

    @router.get("/uploads/{upload_id}/remove")
    def confirm(upload_id: UUID) -> Response:
        return pages.page("uploads_remove.html", upload=uploads.get(upload_id))

    @router.post("/uploads/{upload_id}/remove")
    def remove(upload_id: UUID) -> Response:
        uploads.remove(upload_id)
        return RedirectResponse(f"{pages.root}/uploads", status_code=303)

    return router
