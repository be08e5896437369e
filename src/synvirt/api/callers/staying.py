"""A stream and an upload go on only while their caller would be admitted: they may take days, and meanwhile a token is revoked
or has expired, an account is removed or gets another password or role, or a session ends."""

import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synvirt.errors import SynvirtError

# A quiet stream sends something as often. A busy one would ask the store several times a second.
CHECKED_EVERY_S = 15.0
STREAM_TYPE = "text/event-stream"

_log = structlog.get_logger("synvirt.api")


class _Over(Exception):
    """Ends the app's own code in the middle of its answer."""


async def staying(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, refused: Callable[[], Awaitable[SynvirtError | None]]
) -> None:
    """Runs the app. As soon as `refused` says why its caller is not admitted any more, a stream that it answers ends, and a
    body that it receives fails with that error."""
    checked_at: float | None = None  # only of a stream
    received_at: float | None = time.monotonic()  # None: the body was refused

    async def receiving() -> Message:
        nonlocal received_at
        message = await receive()
        ahead = message["type"] == "http.request" and message.get("more_body", False)
        if ahead and received_at is not None and time.monotonic() - received_at >= CHECKED_EVERY_S:
            received_at = time.monotonic()
            if (why := await refused()) is not None:
                _log.info("an upload ends", why=why.detail)
                received_at = None  # the app's answer may read on, to close the connection well
                raise why
        return message

    async def sending(message: Message) -> None:
        nonlocal checked_at
        if message["type"] == "http.response.start":
            is_stream = Headers(raw=message.get("headers", [])).get("content-type", "").startswith(STREAM_TYPE)
            checked_at = time.monotonic() if is_stream else None
        elif checked_at is not None and time.monotonic() - checked_at >= CHECKED_EVERY_S:
            checked_at = time.monotonic()
            if (why := await refused()) is not None:
                _log.info("a stream ends", why=why.detail)
                raise _Over
        await send(message)

    try:
        await app(scope, receiving, sending)
    except _Over:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
