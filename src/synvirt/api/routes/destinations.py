"""{base_url}/api/v1/migrator/destinations: where volumes can go, by the names in plans."""

from collections.abc import Mapping

from fastapi import APIRouter

from synvirt.api.paging import PAGE_LIMIT, LastName, Limit, named_page
from synvirt.api.routing import Routes
from synvirt.destinations import Destination, free_bytes_shown
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
    """The default first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[DestinationShown, ...]
    next_cursor: str | None = None


def destinations_router(destinations: Mapping[str, Destination]) -> APIRouter:
    """`destinations` by name, the default first."""
    router = Routes(prefix="/destinations", tags=["destinations"])

    @router.get("", response_model=DestinationPage)
    def list_destinations(limit: Limit = PAGE_LIMIT, cursor: LastName = None) -> DestinationPage:
        """The destinations that a plan may name as `target.destination`."""
        names, following = named_page(list(destinations), str, limit=limit, cursor=cursor)
        shown_here = shown({name: destinations[name] for name in names}, default=next(iter(destinations)))
        return DestinationPage(items=tuple(shown_here), next_cursor=following)

    return router


def shown(destinations: Mapping[str, Destination], *, default: str | None = None) -> list[DestinationShown]:
    """The destinations with their free bytes: blocking. `default`: the name of the default; None: the first."""
    default = default or next(iter(destinations), None)
    return [_shown(name, one, default=name == default) for name, one in destinations.items()]


def _shown(name: str, destination: Destination, *, default: bool) -> DestinationShown:
    free_bytes, problem = None, None
    try:
        free_bytes = free_bytes_shown(destination)
    except SynvirtError as error:
        problem = error.detail
    return DestinationShown(name=name, kind=destination.kind, default=default, free_bytes=free_bytes, problem=problem)
