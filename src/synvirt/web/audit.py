"""{base_url}/audit: who did what, for admins."""

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.api.routes.audit import verified
from synvirt.store.access import AuditRows
from synvirt.web.pages import Pages

SHOWN = 100


def audit_router(pages: Pages, rows: AuditRows) -> APIRouter:
    """The page of the audit trail."""
    router = pages.router()

    @router.get("/audit")
    def audit(cursor: Cursor = None) -> Response:
        items, following = rows.page(limit=SHOWN, cursor=number_of(cursor))
        return pages.page("audit.html", entries=items, cursor=cursor, following=following, verified=None)

    @router.post("/audit/verify")
    def verify() -> Response:
        """Reads the whole trail, so it runs only on request."""
        items, following = rows.page(limit=SHOWN)
        return pages.page("audit.html", entries=items, cursor=None, following=following, verified=verified(rows))

    return router
