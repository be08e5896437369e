"""Routers that are looked through only for paths that they may have; and paths that have a second name.

FastAPI asks one router after the other for every request, and each tries all of its routes: with 300 routes that is half a
millisecond for a path of one of the last."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

# Of a route's path: `/waves` of `/waves/{wave_id}/approval`.
_BEGINNING = re.compile(r"/?[^/{]*")


class Routes(APIRouter):
    """A router whose routes are all added before the first request. `at`: the path at which it is mounted, if it is known."""

    def __init__(self, *, at: str | None = None, **named: Any) -> None:
        super().__init__(**named)
        self._at = at

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        return tuple({f"{self._at or ''}{_beginning(route)}" for route in self.routes})

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As in APIRouter: whether a route of this router has the path."""
        path: str = scope["path"]
        may_be = any(each in path for each in self._beginnings) if self._at is None else path.startswith(self._beginnings)
        return super().matches(scope) if may_be else (Match.NONE, {})


class AlsoUnder:
    """Serves `prefix`/NAME under `also`/NAME as well. Outside of all layers that go by the path: roles, the audit trail."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str], prefix: str, also: str) -> None:
        self._app, self._prefix, self._also = app, prefix, also
        self._second = re.compile(rf"{re.escape(also)}/({'|'.join(names)})(/.*)?", re.DOTALL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._second.fullmatch(scope["path"]):
            scope = {**scope, "path": self._prefix + scope["path"].removeprefix(self._also)}
        await self._app(scope, receive, send)


def _beginning(route: BaseRoute) -> str:
    """What is in every path of the route. Of a router in the router it is not known: "" is in all."""
    found = _BEGINNING.match(getattr(route, "path", ""))
    return found[0] if found else ""
