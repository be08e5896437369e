"""Makes `application/problem+json` (RFC 9457) of errors; no other module does. A browser outside the API gets a page instead.

A SynvirtError gives its code, detail and hint. An unexpected error gives only an incident number, and the log has the rest: so
no traceback, secret or path of the host leaves the service.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt.api.tags import BackupChangedMeanwhile, ChangedMeanwhile
from synvirt.errors import (
    BadRequest,
    Internal,
    InvalidPlan,
    NotFound,
    SynvirtError,
    Unauthorized,
    UploadNotFound,
    not_listed,
)
from synvirt.jobs.shortage import lack_of
from synvirt.mistakes import place, worded, written
from synvirt.model.backup_codes import of_backups
from synvirt.model.problems import ProblemDetails
from synvirt.model.values import Received
from synvirt.nearest import did_you_mean
from synvirt.programs import ProgramFailed

MEDIA_TYPE = "application/problem+json"
# A person corrects one mistake at a time, and a hostile body can contain a million.
MISTAKES_SHOWN = 5
# The caller's text comes back in `detail` (a field's name): enough to recognise it.
NAME_CHARS_SHOWN = 100

_log = structlog.get_logger("synvirt.api")


def problem(error: SynvirtError, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """`status`: replaces the error's own, and the title with it (RFC 9110 section 15)."""
    title = error.title() if status is None else HTTPStatus(status).phrase
    details = ProblemDetails(title=title, status=status or error.status, code=error.code, detail=error.detail, hint=error.hint)
    # ASCII: a lone surrogate in a caller's name can be escaped, but not encoded.
    return Response(
        json.dumps(details.model_dump()).encode("ascii"),
        status_code=details.status,
        media_type=MEDIA_TYPE,
        headers=dict(headers or {}) | ({"WWW-Authenticate": CHALLENGE} if isinstance(error, Unauthorized) else {}),
    )


# An error as a page; a status replaces the error's own.
AsPage = Callable[[SynvirtError, int | None], Response]


def answered(
    scope: Scope, error: SynvirtError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The error as a page for a person's browser, else as a problem. `status`: as in `problem`."""
    as_page = _as_page(scope)
    if as_page is None:
        return problem(of_its_side(scope["path"], error), status=status, headers=headers)
    page = as_page(error, status)
    page.headers.update(headers or {})
    return page


def _as_page(scope: Scope) -> AsPage | None:
    """What makes pages of errors; None for a request to the API, or one that no browser of a person sent."""
    if "app" not in scope or "text/html" not in Headers(scope=scope).get("accept", "") or "/api/v1/" in f"{scope['path']}/":
        return None
    found: AsPage | None = scope["app"].state.as_page
    return found


# RFC 7617: the browser's password box appears, and passwords are UTF-8.
CHALLENGE = 'Basic realm="SynVirt", charset="UTF-8"'


def refused(mistakes: Sequence[ErrorDetails | Mapping[str, Any]]) -> SynvirtError:
    """Pydantic's list of mistakes as one error: InvalidPlan when one is inside the plan, else BadRequest."""
    shown = [_mistake(mistake) for mistake in mistakes[:MISTAKES_SHOWN]]
    if len(mistakes) > MISTAKES_SHOWN:
        shown.append(f"and {len(mistakes) - MISTAKES_SHOWN} more")
    in_plan = any(
        tuple(mistake["loc"][:2]) == ("body", "plan") and (len(mistake["loc"]) > 2 or mistake["type"] != "missing")
        for mistake in mistakes
    )
    chosen = InvalidPlan if in_plan else BadRequest
    return chosen("; ".join(shown), hint="/openapi.json describes what each request takes")


def _mistake(mistake: ErrorDetails | Mapping[str, Any]) -> str:
    of, *path = mistake["loc"] or ("request",)
    names = [part if isinstance(part, int) else part[:NAME_CHARS_SHOWN] for part in written(path)]
    if of == "query":  # only pydantic sees a repeatable parameter as a list
        names = [name for name in names if isinstance(name, str)]
    where = place(names) or f"the {of}"
    return f"{where}: {worded(mistake)}{_meant(names[-1]) if mistake['type'] == 'extra_forbidden' and names else ''}"


def _meant(name: str | int) -> str:
    """The field with the most similar name, of all fields of requests. A field of another request means nothing here."""
    near = None if name in _fields() else did_you_mean(str(name), _fields())
    return "" if near is None else f"; {near}"


@cache
def _fields() -> tuple[str, ...]:
    kinds, names = [Received], set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names.update(kind.model_fields)
    return tuple(sorted(names))


def incident(error: BaseException) -> Internal:
    """Logs an unexpected error, and returns the error that may be shown for it."""
    number = uuid4().hex[:12]
    _log.error("unexpected error", incident=number, exc_info=error)
    if (lack := lack_of(error)) is not None:
        what, hint = lack
        return Internal(f"the service cannot do this now: {what}; its log has it as incident {number}", hint=hint)
    return Internal(
        f"something unexpected went wrong; the service's log has it as incident {number}",
        hint="look the incident up in the log, and report it if the log does not explain it",
    )


class Incidents:
    """The outermost layer: an exception that nothing else caught is an incident, and the answer has its number."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            answer = answered(scope, error if isinstance(error, SynvirtError) else incident(error))
            if started:
                raise  # the answer has begun and cannot be changed: the server closes the connection
            await answer(scope, receive, send)


def install(app: FastAPI, as_page: AsPage | None = None) -> None:
    """Call it last: `Incidents` must be the outermost of the app's layers. `as_page`: for browsers; None: they get problems."""
    app.state.as_page = as_page
    app.add_exception_handler(SynvirtError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_routing)
    app.add_middleware(Incidents)


def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, SynvirtError)
    # A program's own message may contain any path of the host.
    return problem(incident(error) if isinstance(error, ProgramFailed) else of_its_side(request.url.path, error))


def of_its_side(path: str, error: SynvirtError) -> SynvirtError:
    """The error with the code of the side to which the request's `path` belongs."""
    if "/api/v1/backup/" not in f"{path}/":
        return error
    if isinstance(error, ChangedMeanwhile):
        return BackupChangedMeanwhile(error.detail, hint=error.hint)
    return of_backups(error)


_PATHS = "/openapi.json lists all paths"
# What a thing is called whose id is a parameter of a path, where that is not the parameter's name.
_NOUNS = {
    "run_id": "backup run",
    "job_id": "backup job",
    "point_id": "restore point",
    "repository_id": "backup repository",
    "number": "delivery",
}


def _noun(parameter: str) -> str:
    return _NOUNS.get(parameter, parameter.removesuffix("_id"))


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    for mistake in mistakes:
        if mistake["loc"][0] == "path":  # an id that is no UUID is not one of this service
            noun = _noun(str(mistake["loc"][1]))
            missing = not_listed(noun, repr(str(mistake["input"])[:NAME_CHARS_SHOWN]))
            if noun == "upload":
                missing = UploadNotFound(missing.detail, hint=missing.hint)
            return problem(of_its_side(request.url.path, missing))
    return problem(of_its_side(request.url.path, refused(mistakes)))


def _on_routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method[:NAME_CHARS_SHOWN]} {request.url.path[:NAME_CHARS_SHOWN]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        if _as_page(request.scope) is not None:
            return answered(request.scope, NotFound(f"there is no page at {request.url.path[:NAME_CHARS_SHOWN]}"))
        return answered(request.scope, _no_thing(request) or NotFound(f"nothing is served at {where}", hint=_PATHS))
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "")  # a page is in no document
    hint = f"it takes {headers['Allow']}" if headers.get("Allow") else None
    refusal = BadRequest(f"{where}: {error.detail}", hint=hint)
    return answered(request.scope, refusal, status=error.status_code, headers=headers)


def _no_thing(request: Request) -> SynvirtError | None:
    """NotFound for a path of the document whose id cannot be one: a route with a converter does not match it."""
    for template, operations in _served(request).items():
        pattern, of_path = _pattern(template)
        found = pattern.match(request.url.path)
        if found is not None and of_path and request.method.upper() in operations:
            name = of_path[-1]
            return not_listed(_noun(name), repr(found[name][:NAME_CHARS_SHOWN]))
    return None


@cache
def _pattern(template: str) -> tuple[re.Pattern[str], list[str]]:
    """What the paths of a template match, and the names in it. To compile all of them takes longer than to answer."""
    pattern, _, of_path = compile_path(template)
    return pattern, list(of_path)


def _served(request: Request) -> dict[str, set[str]]:
    """The methods of each path of the document. Not of the document itself: to make it takes half a second of a processor."""
    served = defaultdict[str, set[str]](set)
    for route in iter_route_contexts(request.app.routes):
        if route.include_in_schema and route.path_format and route.methods:
            served[route.path_format] |= route.methods
    return served


def _methods(request: Request) -> list[str]:
    """All methods of the path (RFC 9110 section 15.5.6); the router's own answer has only its first route's. If the path is
    equal to a template, only that counts: /waves/import is no wave."""
    paths, path = _served(request), request.url.path
    matching = [path] if path in paths else [template for template in paths if _pattern(template)[0].match(path)]
    found = {method for template in matching for method in paths[template]}
    return sorted(found | {"HEAD"} if "GET" in found else found)
