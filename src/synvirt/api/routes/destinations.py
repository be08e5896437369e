"""{base_url}/api/v1/migrator/destinations: where volumes can go, by the names in plans."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query

from synvirt.destinations import Destination
from synvirt.errors import SynvirtError
from synvirt.model.values import Bytes, Model


class DestinationShown(Model):
    """`free_bytes` is null where the destination cannot be used now: `problem` says why."""

    name: str
    kind: str
    default: bool
    free_bytes: Bytes | None
    problem: str | None


class DestinationPage(Model):
    """The default first. There are few: one page holds them all."""

    items: tuple[DestinationShown, ...]
    next_cursor: str | None = None


def destinations_router(destinations: Mapping[str, Destination]) -> APIRouter:
    """`destinations` by name, the default first."""
    router = APIRouter(prefix="/destinations", tags=["destinations"])

    @router.get("", response_model=DestinationPage)
    def list_destinations(limit: Annotated[int, Query(ge=1, le=1000)] = 1000) -> DestinationPage:
        """The destinations that a plan may name as `target.destination`."""
        return DestinationPage(items=tuple(shown(destinations)[:limit]))

    return router


def shown(destinations: Mapping[str, Destination]) -> list[DestinationShown]:
    """The destinations with their free bytes: blocking."""
    return [_shown(name, one, default=not number) for number, (name, one) in enumerate(destinations.items())]


def _shown(name: str, destination: Destination, *, default: bool) -> DestinationShown:
    free_bytes, problem = None, None
    try:
        free_bytes = destination.free_bytes()
    except SynvirtError as error:
        problem = error.detail
    return DestinationShown(name=name, kind=destination.kind, default=default, free_bytes=free_bytes, problem=problem)
