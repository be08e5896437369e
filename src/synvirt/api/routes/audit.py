"""The audit trail: each request that may change something, or shows a key, is an entry, and {base_url}/api/v1/audit shows the
entries. Log-ins and log-outs are entries too (`callers/coming.py`)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Annotated

import structlog
from anyio import to_thread
from fastapi import APIRouter, Query, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt.acting import current
from synvirt.api.callers.coming import Caller, entry_of
from synvirt.api.callers.gate import CALLER
from synvirt.api.callers.origin import READING
from synvirt.api.paging import Cursor, Number, cursor_of, number_of
from synvirt.api.routing import Routes
from synvirt.errors import SynvirtError
from synvirt.model.values import Model, now
from synvirt.repeating import repeated
from synvirt.store.access import AuditEntry, AuditRows, Link, broken_at

PAGE = 500
# Some megabytes for each answer; a collector asks again after the last entry.
LINES = 5000
LINES_TYPE = "application/x-ndjson"
# Entries are kept for months, so an hour does not matter.
EXPIRE_EVERY_S = 3600.0

_log = structlog.get_logger("synvirt.audit")


class Audited:
    """A layer of the app, inside the gate. The answer is sent after its entry is written. `quiet`: paths without entries.
    `shows_key`: paths with entries for reading, too."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        write: Callable[[AuditEntry], None],
        quiet: tuple[str, ...] = (),
        shows_key: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._app, self._write, self._quiet, self._shows_key = app, write, quiet, shows_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get(CALLER)
        path = str(scope.get("path", ""))
        noted = scope["type"] == "http" and (scope["method"] not in READING or self._shows_key(path))
        if not noted or caller is None or path.startswith(self._quiet or "\0"):
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                location = Headers(raw=message.get("headers", [])).get("location", "")
                await to_thread.run_sync(self._note, caller, scope["method"], path, message["status"], location)
            await send(message)

        await self._app(scope, receive, sending)

    def _note(self, caller: Caller, method: str, path: str, status: int, location: str) -> None:
        act = current()  # the thread has the request's context
        self._write(entry_of(caller, method, path, status, location, digest=None if act is None else act.plan_digest))


def write(rows: AuditRows, entry: AuditEntry) -> None:
    """Adds an entry to the trail. If the store fails, the entry is logged: the action is done already."""
    try:
        rows.add(entry)
    except SynvirtError as error:
        # The log is the second trail. The action is done, so a refusal would be wrong.
        _log.error("not in the audit trail", why=error.detail, **entry.model_dump(mode="json", exclude={"seq"}))


def expiring(rows: AuditRows, days: float) -> AbstractContextManager[None]:
    """Removes older entries while the block runs. 0 days: none."""

    def expire() -> None:
        try:
            gone = rows.expire(now() - timedelta(days=days))
        except SynvirtError as error:
            _log.warning("old entries of the audit trail could not be removed", why=error.detail)
            return
        if gone:
            _log.info("old entries of the audit trail are removed", count=gone)

    if not days:
        return nullcontext()
    return repeated(expire, name="audit", every_s=EXPIRE_EVERY_S, ends_within_s=1.0)


class AuditPage(Model):
    """Newest first."""

    items: tuple[AuditEntry, ...]
    next_cursor: str | None = None


class AuditVerified(Model):
    """`broken_at`: the first entry at which the chain is broken; None: it is whole."""

    entries: int
    broken_at: int | None = None


def audit_router(rows: AuditRows) -> APIRouter:
    """The routes under /audit."""
    router = Routes(prefix="/audit", tags=["audit"])

    @router.get("", response_model=AuditPage)
    def list_audit(limit: Annotated[int, Query(ge=1, le=PAGE)] = 100, cursor: Cursor = None) -> AuditPage:
        """Who did what, newest first."""
        items, following = rows.page(limit=limit, cursor=number_of(cursor))
        return AuditPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/verify", response_model=AuditVerified)
    def verify_audit() -> AuditVerified:
        """Whether an entry was changed or removed since it was written."""
        return verified(rows)

    @router.get("/export", response_class=Response, responses={200: {"content": {LINES_TYPE: {"schema": {"type": "string"}}}}})
    def export_audit(
        after: Annotated[Number, Query(description="Only entries after this number")] = 0,
        limit: Annotated[int, Query(ge=1, le=LINES)] = LINES,
    ) -> Response:
        """Who did what, as JSON lines, oldest first: each line is an entry as it was written. Ask again after the last one's
        `seq`, until nothing comes."""
        return Response("".join(f"{line}\n" for line in rows.lines(after=after, limit=limit)), media_type=LINES_TYPE)

    return router


def verified(rows: AuditRows) -> AuditVerified:
    """Reads the whole trail, and reports where its chain of hashes is broken, if it is."""
    while True:
        oldest, count = rows.oldest(), 0

        def counted() -> Iterator[Link]:
            nonlocal count
            for link in rows.links(a_piece=PAGE):
                count += 1
                yield link

        found = broken_at(counted())
        # The entry about old ones that were removed meanwhile is newer than where this began to read: it reads again.
        if found is None or rows.oldest() == oldest:
            return AuditVerified(broken_at=found, entries=count)
