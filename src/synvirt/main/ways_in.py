"""The API's routes and the page's."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from synvirt.api import Site
    from synvirt.api.routes.waves import Fleet
    from synvirt.backups.service import Backups
    from synvirt.doctor import Checkup
    from synvirt.jobs.inspecting.looking import Looking
    from synvirt.keyring import Keyring
    from synvirt.migrations.intake import Intake
    from synvirt.migrations.rooms import Rooms
    from synvirt.migrations.sources.registered import Sources
    from synvirt.migrations.uploads import Uploads
    from synvirt.rehearsals.asking import Rehearsing
    from synvirt.settings import Settings
    from synvirt.store import Store


def make_routers(
    settings: "Settings",
    store: "Store",
    rooms: "Rooms",
    *,
    uploads: "Uploads",
    sources: "Sources",
    looking: "Looking",
    rehearsing: "Rehearsing",
) -> "tuple[APIRouter, ...]":
    """The routers of the API, under /api/v1/migrator."""
    from synvirt.api.routes.destinations import destinations_router
    from synvirt.api.routes.host_files import host_files_router
    from synvirt.api.routes.hosts import hosts_router
    from synvirt.api.routes.receipts import receipts_router
    from synvirt.api.routes.rehearsals import rehearsals_router
    from synvirt.api.routes.remote_files import remote_files_router
    from synvirt.api.routes.screenshots import screenshots_router
    from synvirt.api.routes.sources import sources_router
    from synvirt.api.routes.uploads import uploads_router
    from synvirt.api.routes.windows import windows_router
    from synvirt.destinations import free_bytes_shown
    from synvirt.migrations.hosts.about import Hosts

    free_bytes = partial(free_bytes_shown, rooms.destination)
    return (
        host_files_router(settings.imports_dir, free_bytes=free_bytes, looking=looking),
        uploads_router(uploads, free_bytes=free_bytes, looking=looking),
        sources_router(sources),
        destinations_router(rooms.destinations),
        hosts_router(Hosts(store, settings.host_id)),
        screenshots_router(store, rooms.hypervisor.screenshot),
        receipts_router(store, rooms.receipts),
        rehearsals_router(rehearsing),
        windows_router(store.windows),
        remote_files_router(rooms.remote_rules, free_bytes=free_bytes, looking=looking),
    )


def make_pages(
    intake: "Intake",
    settings: "Settings",
    rooms: "Rooms",
    checkup: "Checkup",
    *,
    sources: "Sources",
    uploads: "Uploads",
    keyring: "Keyring",
    backups: "Backups",
    looking: "Looking",
    fleet: "Fleet",
    rehearsing: "Rehearsing",
) -> "Callable[[Callable[[], bool]], Site]":
    """The web pages."""
    from synvirt.errors import DomainDefineFailed
    from synvirt.web import website
    from synvirt.web.finding import Finder

    finder = Finder(sources, uploads, rooms.destinations, rooms.remote_rules, keyring, looking)

    def networks() -> list[str]:
        """As suggestions: a form takes any name."""
        try:
            return rooms.hypervisor.networks()
        except DomainDefineFailed:
            return [rooms.hypervisor.default_network]

    return lambda stopping: website(
        intake,
        settings,
        screenshot=rooms.hypervisor.screenshot,
        networks=networks,
        sources=sources,
        finder=finder,
        backups=backups,
        checkup=checkup,
        waves=fleet.waves,
        forecaster=fleet.forecaster,
        deliveries=fleet.deliveries,
        importer=fleet.importer,
        receipts=rooms.receipts,
        rehearsing=rehearsing,
        stopping=stopping,
    )
