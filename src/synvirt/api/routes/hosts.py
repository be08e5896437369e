"""{base_url}/api/v1/migrator/hosts: the hosts that share this store."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from synvirt.migrations.hosts import Host, Hosts
from synvirt.model.values import Model


class HostPage(Model):
    """By id. There are few: one page holds them all."""

    items: tuple[Host, ...]
    next_cursor: str | None = None


def hosts_router(hosts: Hosts) -> APIRouter:
    """The routes under /hosts."""
    router = APIRouter(prefix="/hosts", tags=["hosts"])

    @router.get("", response_model=HostPage)
    def list_hosts(limit: Annotated[int, Query(ge=1, le=1000)] = 1000) -> HostPage:
        """The hosts that share this store, each with its lease, its jobs and its destinations."""
        return HostPage(items=tuple(hosts.all()[:limit]))

    @router.post("/{host_id}/fence", response_model=Host)
    def fence(host_id: Annotated[str, Path(min_length=1, max_length=255, pattern=r"^[\w.-]+$")]) -> Host:
        """Say that a host is off, and that its guests run there no more. What it still has under way ends within seconds, where
        it is alive; its writes to the store are refused at once."""
        return hosts.fence(host_id)

    return router
