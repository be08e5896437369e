"""{base_url}/api/v1/migrator/hosts: the hosts that share this store."""

from typing import Annotated

from fastapi import APIRouter, Path

from synvirt.api.paging import PAGE_LIMIT, LastName, Limit, named_page
from synvirt.api.routing import Routes
from synvirt.migrations.hosts.about import Host, Hosts
from synvirt.model.values import Model


class HostPage(Model):
    """By id. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Host, ...]
    next_cursor: str | None = None


def hosts_router(hosts: Hosts) -> APIRouter:
    """The routes under /hosts."""
    router = Routes(prefix="/hosts", tags=["hosts"])

    @router.get("", response_model=HostPage)
    def list_hosts(limit: Limit = PAGE_LIMIT, cursor: LastName = None) -> HostPage:
        """The hosts that share this store, each with its lease, its jobs and its destinations."""
        items, following = named_page(hosts.all(), lambda host: host.id, limit=limit, cursor=cursor)
        return HostPage(items=items, next_cursor=following)

    @router.post("/{host_id}/fence", response_model=Host)
    def fence(host_id: Annotated[str, Path(min_length=1, max_length=255, pattern=r"^[\w.-]+$")]) -> Host:
        """Fence a host: declare that it is off, and that no guest runs there. If it is alive, its jobs end within seconds; its
        writes to the store are refused at once."""
        return hosts.fence(host_id)

    return router
