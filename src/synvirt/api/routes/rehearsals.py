"""The rehearsals of a job, and POST /rehearsals for several jobs at once."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response

from synvirt.api.document import BEGUN, problem_described
from synvirt.api.paging import PAGE_LIMIT, Cursor, Limit, cursor_of, number_of
from synvirt.api.received import documented, json_body, optional_json_body
from synvirt.api.routes.screenshots import PNG
from synvirt.api.routing import Routes
from synvirt.model.rehearsal import Rehearsal, RehearsalPage, RehearsalRequest, TogetherRequest
from synvirt.rehearsals.asking import Rehearsing


def rehearsals_router(rehearsing: Rehearsing) -> APIRouter:
    """The routes of rehearsals, of one job and of several together."""
    router = Routes(tags=["rehearsals"])

    @router.post(
        "/rehearsals",
        status_code=202,
        response_model=RehearsalPage,
        openapi_extra=documented(TogetherRequest, required=True),
        responses={409: problem_described("E_MIG_CONFLICT: these cannot be rehearsed together now; `detail` says why")},
    )
    def rehearse_together(group: Annotated[TogetherRequest, Depends(json_body(TogetherRequest))]) -> RehearsalPage:
        """Start the guests of several warm jobs, or of a wave, in one network, so that they reach each other. They start in the
        order of the list, each once the one before it has booted. Each has its own rehearsal, and all are removed when all have
        been checked. 409 where one of them cannot be rehearsed or is named twice, where too few of a wave copy warm, or where
        their jobs are on several hosts."""
        return RehearsalPage(items=tuple(rehearsing.ask_together(group)))

    # As clients of earlier versions ask for one.
    @router.post("/migrations/{migration_id}/rehearse", status_code=202, response_model=Rehearsal, include_in_schema=False)
    @router.post(
        "/migrations/{migration_id}/rehearsals",
        status_code=202,
        response_model=Rehearsal,
        openapi_extra=documented(RehearsalRequest, required=False),
        responses=BEGUN,
    )
    def rehearse(
        rehearsal: Annotated[RehearsalRequest, Depends(optional_json_body(RehearsalRequest))],
        migration_id: UUID,
        request: Request,
        response: Response,
    ) -> Rehearsal:
        """Start the guest of a warm job from clones of its volumes, check it, and remove all of it again. The clones are made
        between two passes, and the copying goes on; neither the source nor the volumes are touched. A job has one rehearsal at
        a time. 409 where the job copies cold or has begun its cut-over, or where its destination cannot clone."""
        made = rehearsing.ask(migration_id, rehearsal)
        response.headers["Location"] = f"{request.url.path.rsplit('/', 1)[0]}/rehearsals/{made.id}"
        return made

    @router.get("/migrations/{migration_id}/rehearsals", response_model=RehearsalPage)
    def list_rehearsals(migration_id: UUID, limit: Limit = PAGE_LIMIT, cursor: Cursor = None) -> RehearsalPage:
        """The job's rehearsals, newest first: the last twenty are kept."""
        items, following = rehearsing.page(migration_id, limit=limit, cursor=number_of(cursor))
        return RehearsalPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/migrations/{migration_id}/rehearsals/{rehearsal_id}", response_model=Rehearsal)
    def load_rehearsal(migration_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """One rehearsal, with the results of its checks."""
        return rehearsing.get(migration_id, rehearsal_id)

    @router.post("/migrations/{migration_id}/rehearsals/{rehearsal_id}/cancel", status_code=202, response_model=Rehearsal)
    def cancel_rehearsal(migration_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """Ask a rehearsal to stop. It is Cancelled once everything that it made is removed. One that has ended: 409."""
        return rehearsing.cancel(migration_id, rehearsal_id)

    @router.get(
        "/migrations/{migration_id}/rehearsals/{rehearsal_id}/screenshot",
        response_class=Response,
        responses={200: {"content": {PNG: {}}}},
    )
    def rehearsal_screenshot(migration_id: UUID, rehearsal_id: UUID) -> Response:
        """The last screen of the rehearsed guest, as a PNG. 404 where there is none."""
        picture = rehearsing.screenshot(migration_id, rehearsal_id)
        # The guest drew it: a browser must treat it only as a picture.
        return Response(picture, media_type=PNG, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})

    return router
