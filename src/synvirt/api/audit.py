"""Who did what: each request that may change something is an entry of the audit trail, and {base_url}/api/v1/audit shows it."""

from collections.abc import Iterator
from typing import Annotated

import structlog
from anyio import to_thread
from fastapi import APIRouter, Query
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt.api.gate import CALLER, Caller
from synvirt.api.origin import READING
from synvirt.errors import SynvirtError
from synvirt.model import Model, now
from synvirt.store.access import AuditEntry, AuditRows, broken_at

# A path of a caller may be as long as its request line.
RESOURCE_CHARS_MAX = 500
PAGE = 500

_log = structlog.get_logger("synvirt.audit")


class Audited:
    """A layer of the app, inside the door. The answer goes out once its entry is written. `quiet`: paths beneath which nothing
    is noted."""

    def __init__(self, app: ASGIApp, *, rows: AuditRows, quiet: tuple[str, ...] = ()) -> None:
        self._app, self._rows, self._quiet = app, rows, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get(CALLER)
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or scope["method"] in READING or caller is None or path.startswith(self._quiet or "\0"):
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                location = Headers(raw=message.get("headers", [])).get("location", "")
                await to_thread.run_sync(self._note, caller, scope["method"], path, message["status"], location)
            await send(message)

        await self._app(scope, receive, sending)

    def _note(self, caller: Caller, method: str, path: str, status: int, location: str) -> None:
        entry = AuditEntry(
            at=now(),
            account=caller.account[:100],
            role=str(caller.role),
            address=caller.address,
            method=method[:10],
            resource=path[:RESOURCE_CHARS_MAX],
            result=status,
            detail=location[:RESOURCE_CHARS_MAX],
        )
        try:
            self._rows.add(entry)
        except SynvirtError as error:
            # The log is the second trail. To refuse what was done already would be no truer.
            _log.error("not in the audit trail", why=error.detail, **entry.model_dump(mode="json", exclude={"seq"}))


class AuditPage(Model):
    """Newest first."""

    items: tuple[AuditEntry, ...]
    next_cursor: str | None = None


class AuditVerified(Model):
    """`broken_at`: the entry from which on the chain does not hold; None: it does."""

    entries: int
    broken_at: int | None = None


def audit_router(rows: AuditRows) -> APIRouter:
    router = APIRouter(prefix="/audit", tags=["audit"])

    @router.get("", response_model=AuditPage)
    def list_audit(
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 100, cursor: Annotated[int | None, Query(ge=1)] = None
    ) -> AuditPage:
        """Who did what, newest first."""
        items, after = rows.page(limit=limit, cursor=cursor)
        return AuditPage(items=tuple(items), next_cursor=None if after is None else str(after))

    @router.get("/verify", response_model=AuditVerified)
    def verify_audit() -> AuditVerified:
        """Whether an entry was changed or removed since it was written."""
        count = 0

        def counted() -> Iterator[AuditEntry]:
            nonlocal count
            cursor: int | None = None
            while True:
                items, cursor = rows.page(limit=PAGE, cursor=cursor)
                count += len(items)
                yield from items
                if cursor is None:
                    return

        return AuditVerified(broken_at=broken_at(counted()), entries=count)

    return router
