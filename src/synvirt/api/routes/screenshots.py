"""GET /migrations/:id/screenshot: the screen of a guest that did not boot."""

from collections.abc import Callable
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.routing import Routes
from synvirt.errors import NotFound
from synvirt.store import Store

PNG = "image/png"


def screenshots_router(store: Store, screenshot: Callable[[UUID], bytes | None]) -> APIRouter:
    """`screenshot`: of a job, a PNG; None, if there is none."""
    router = Routes(prefix="/migrations", tags=["migrations"])

    @router.get("/{migration_id}/screenshot", response_class=Response, responses={200: {"content": {PNG: {}}}})
    def screenshot_of(migration_id: UUID) -> Response:
        """The guest's screen when the job gave up on it, as a PNG. 404 if the guest booted, or never started."""
        job = store.get(migration_id)
        picture = screenshot(job.id)
        if picture is None:
            raise NotFound(f"job {job.id} has no screenshot", hint="only a guest that was started and did not boot leaves one")
        # The guest drew it: a browser must treat it only as a picture.
        return Response(picture, media_type=PNG, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})

    return router
