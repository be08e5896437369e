"""The door: every path needs credentials, but the few that are named here, and the Unix socket's callers.

A route that is added later is behind the door without a word, because the door knows only exceptions.
"""

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from synvirt.api.problems import problem
from synvirt.errors import Unauthorized


class Authenticate(Protocol):
    """Who may call. `address` is where the caller is; "" is the Unix socket's."""

    def knows(self, user: str, password: str) -> bool:
        """Was this right a moment ago? At once: it is asked in the event loop, for each request."""
        ...

    def check(self, user: str, password: str, address: str) -> None:
        """Unauthorized if it is wrong. Blocking, and slow by design: it is called in a thread."""
        ...


# Each is a core and 16 MiB (scrypt), or seconds (PAM, when it is wrong). In threads of their own: however many strangers
# guess, those who are known and the endpoints' own threads do not wait for them.
CHECKS_AT_ONCE = 4
# What a load balancer asks, and what a client generator reads: neither says anything about this host. Who sends credentials
# there all the same is known (`KNOWN`), and may be told more.
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
# Longer is no password: PAM and scrypt read all of it.
CREDENTIALS_CHARS_MAX = 2048
# Set by the server on the Unix socket, in the scope: nothing a caller can send reaches it.
LOCAL = "synvirt.local"
# Set by the door: the caller has shown who it is.
KNOWN = "synvirt.known"


class Gate:
    """`confined`: accounts that may call nothing but what is beneath these paths."""

    def __init__(
        self, app: ASGIApp, *, authenticate: Authenticate, confined: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    ) -> None:
        self._app, self._authenticate = app, authenticate
        # Where the host's accounts are asked, one may answer to any spelling of its name.
        self._confined = {user.casefold(): paths for user, paths in confined.items()}
        self._limiter = CapacityLimiter(CHECKS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[KNOWN] = bool(scope.get(LOCAL))
        if scope["type"] == "http" and not scope.get(LOCAL) and _is_asked(scope):
            try:
                await self._admit(scope)
            except Unauthorized as error:
                await problem(error)(scope, receive, send)
                return
            scope[KNOWN] = True
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        user, password = _credentials(Headers(scope=scope).get("authorization"))
        if not self._authenticate.knows(user, password):
            client = scope.get("client")
            await to_thread.run_sync(
                self._authenticate.check, user, password, client[0] if client else "", limiter=self._limiter
            )
        paths = self._confined.get(user.strip().casefold())
        if paths is not None and not any(scope["path"] == path or scope["path"].startswith(f"{path}/") for path in paths):
            raise Unauthorized("this account may use nothing but the folder that is offered to it", hint=f"call {paths[0]}")


class FromSocket:
    """What the Unix socket's server serves: the app, told that its callers were let in by the file's mode."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[LOCAL] = True
        await self._app(scope, receive, send)


def _is_asked(scope: Scope) -> bool:
    return scope["path"] not in OPEN_PATHS or "authorization" in Headers(scope=scope)


def _credentials(header: str | None) -> tuple[str, str]:
    """RFC 7617: base64 of user:password, in UTF-8."""
    if header is None:
        raise Unauthorized("no credentials were sent", hint="send HTTP Basic credentials, or use the Unix socket on the host")
    scheme, _, encoded = header.partition(" ")
    try:
        if scheme.lower() == "basic" and len(encoded) <= CREDENTIALS_CHARS_MAX:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
            user, colon, password = decoded.partition(":")
            if colon and user and "\0" not in decoded:
                return user, password
    except (binascii.Error, ValueError):
        pass
    raise Unauthorized("the Authorization header is not HTTP Basic with a user and a password")
