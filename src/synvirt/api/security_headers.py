"""Headers of every answer for programs that store or show it."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# RFC 6797: a browser that was here once by HTTPS uses only HTTPS for a year.
HSTS = "max-age=31536000"


class Headed:
    """Proxies and browsers store no answer, unless its route allows it; and a browser does not guess types."""

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
