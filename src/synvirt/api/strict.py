"""Requests beyond their path: the query parameters that a route takes, and HEAD for every GET."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin
from urllib.parse import unquote_to_bytes

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt.errors import BadRequest
from synvirt.nearest import did_you_mean
from synvirt.texts.json_once import ONE_COUNTS

# The caller's text comes back in the answer: enough to recognise it.
_NAME_CHARS_SHOWN = 100


def known_parameters(request: Request) -> None:
    """BadRequest for an unknown query parameter: if a filter were ignored, the answer would contain everything; and for one
    that is given again but has one value: the framework takes the last one, and `dry_run=true&dry_run=false` would act; and for
    bytes that are no text: the framework takes other characters for them, and the filter would find nothing."""
    route = request.scope.get("route")
    if not request.scope["query_string"] or not isinstance(route, APIRoute):
        return
    if not _is_text(request.scope["query_string"]):
        raise BadRequest("the query is not UTF-8 with percent-encoding", hint="é is sent as %C3%A9, for example")
    several = dict(_parameters(route.dependant))
    known = sorted(several)
    for name in request.query_params:
        if name in known and not several[name] and len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"{name}: is given more than once", hint=ONE_COUNTS)
        if name not in known:
            near = did_you_mean(name, known)
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise BadRequest(
                f"{name[:_NAME_CHARS_SHOWN]}: is not a parameter of {request.method} {request.url.path[:_NAME_CHARS_SHOWN]}",
                hint=f"{near} {takes}" if near else takes,
            )


def _is_text(query: bytes) -> bool:
    """RFC 3986 section 2.5: what is not ASCII is sent as the percent-encoded bytes of UTF-8. uvicorn refuses any other."""
    try:
        unquote_to_bytes(query).decode()
    except UnicodeDecodeError:
        return False
    return True


def _parameters(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Each parameter's name, and whether it may be given several times."""
    for parameter in dependant.query_params:
        model = parameter.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):  # its fields are the parameters
            yield from ((field.alias or name, _is_list(field.annotation)) for name, field in model.model_fields.items())
        else:
            yield parameter.alias, _is_list(model)
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))


class Heads:
    """HEAD by RFC 9110 section 9.3.2: GET's answer without its body, for load balancers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = False

        async def receive_or_leave() -> Message:
            # A stream of events ends only when its caller leaves.
            return {"type": "http.disconnect"} if answered else await receive()

        async def head_only(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                answered = True

        await self._app({**scope, "method": "GET"}, receive_or_leave, head_only)
