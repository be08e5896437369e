"""What every answer says to anyone who keeps or shows it."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# RFC 6797: a browser that was here once by HTTPS comes by nothing else for a year.
HSTS = "max-age=31536000"


class Headed:
    """No proxy or browser keeps an answer, unless its route says how; and a browser takes a type for what it says."""

    def __init__(self, app: ASGIApp, *, tls: bool) -> None:
        self._app, self._tls = app, tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.setdefault("X-Content-Type-Options", "nosniff")
                if self._tls and scope.get("scheme") == "https":
                    headers.setdefault("Strict-Transport-Security", HSTS)
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)
