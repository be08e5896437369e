"""{base_url}/doctor: what this host has and lacks, as in `synvirt doctor`."""

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.doctor import Checkup, needs_met
from synvirt.web.pages import Pages


def doctor_router(pages: Pages, checkup: Checkup) -> APIRouter:
    """The page of the doctor."""
    router = pages.router()

    @router.get("/doctor")
    def doctor() -> Response:
        """The last result, so that the page does not wait for programs. Only the first check after the service's start is
        waited for."""
        at, findings = checkup.latest() or checkup.renew()
        return pages.page(
            "doctor.html",
            at=at,
            healthy=needs_met(findings),
            needed=[one for one in findings if one.needed and not one.found],
            lacking=[one for one in findings if not one.needed and not one.found],
            found=[one for one in findings if one.found],
        )

    @router.post("/doctor")
    def look_again() -> Response:
        checkup.renew()
        return pages.see("/doctor")

    return router
