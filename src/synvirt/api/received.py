"""Reads what a caller sends, strictly: the body's size, type and every field of it.

FastAPI's own way accepts "4" for 4 and "yes" for true, and parses before it checks the size. Here the OpenAPI document holds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import cache
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from synvirt.api.problems import refused
from synvirt.errors import BadRequest, UnsupportedMediaType
from synvirt.model.values import Received
from synvirt.sizes import KIB, MIB
from synvirt.texts.json_once import ONE_COUNTS, Doubled, refuse_doubled

# A plan with a thousand networks and disks has 100 KiB; a larger body is a mistake or an attack.
BODY_LIMIT_BYTES = MIB
# A body arrives in this time, and in that which the longest that is allowed takes over a slow line. Anybody may send the form
# of the log-in: no one keeps a connection by it.
BODY_WITHIN_S, SLOW_LINE_BPS = 30.0, 64 * KIB
# While a larger body is parsed, the event loop serves no other request.
AT_ONCE_BYTES = MIB

Body = TypeVar("Body", bound=Received)


@cache
def json_body(model: type[Body], *, limit_bytes: int = BODY_LIMIT_BYTES) -> Callable[[Request], Awaitable[Body]]:
    """A dependency that reads the body as `model`, or raises BadRequest or InvalidPlan naming each mistake;
    UnsupportedMediaType."""

    async def read(request: Request) -> Body:
        _check_type(request.headers.get("content-type", ""))
        body = await bounded(request, limit_bytes)
        try:
            if len(body) > AT_ONCE_BYTES:
                return await run_in_threadpool(_read, model, body)
            return _read(model, body)
        except ValidationError as error:
            mistakes = error.errors(include_url=False)
            raise refused([{**mistake, "loc": ("body", *mistake["loc"])} for mistake in mistakes]) from None

    return read


def _read(model: type[Body], body: bytes) -> Body:
    read = model.model_validate_json(body, strict=True)
    try:
        refuse_doubled(body)
    except Doubled as doubled:
        raise BadRequest(f"{str(doubled)[:100]}: is given more than once", hint=ONE_COUNTS) from None
    return read


@cache
def optional_json_body(model: type[Body], *, limit_bytes: int = BODY_LIMIT_BYTES) -> Callable[[Request], Awaitable[Body]]:
    """Like `json_body`, but without a body it gives the model's defaults."""
    read = json_body(model, limit_bytes=limit_bytes)

    async def read_or_default(request: Request) -> Body:
        sends = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        return await read(request) if sends else model()

    return read_or_default


def documented(model: type[Received], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of an operation that takes `model`; document.py adds the model itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _check_type(content_type: str) -> None:
    message = Message()
    message["content-type"] = content_type
    # get_content_type gives text/plain for what it cannot read.
    if message.get_content_type() != "application/json":
        shown = repr(content_type[:100]) if content_type else "missing"
        raise UnsupportedMediaType(
            f"the body's Content-Type is {shown}; it must be application/json",
            hint="send the header Content-Type: application/json",
        )


async def bounded(request: Request, limit_bytes: int = BODY_LIMIT_BYTES) -> bytes:
    """The body. BadRequest, if it is longer than a person or a client of ours would send, or does not come."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdecimal() and len(declared) < 20 and int(declared) > limit_bytes):
        within_s = BODY_WITHIN_S + limit_bytes / SLOW_LINE_BPS
        try:
            async with asyncio.timeout(within_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit_bytes:
                        break
                else:
                    return bytes(body)
        except TimeoutError as error:
            raise BadRequest(f"the body did not come within {within_s:.0f} s", hint="send the request again") from error
        except ClientDisconnect as error:
            raise BadRequest("the caller disconnected before the body was complete") from error
    raise BadRequest(f"the body is over {limit_bytes} bytes", hint="a plan is a few kilobytes: is this the right file?")
