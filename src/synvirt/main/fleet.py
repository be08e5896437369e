"""Puts the parts of waves together."""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synvirt.api.routes.waves import Fleet
    from synvirt.fleet.carrying import Carrying
    from synvirt.keyring import Keyring
    from synvirt.migrations.hosts.about import AboutHost
    from synvirt.migrations.intake import Intake
    from synvirt.migrations.rooms import Rooms
    from synvirt.migrations.sources.registered import Sources
    from synvirt.settings import Settings


def make_fleet(
    stack: ExitStack,
    settings: "Settings",
    rooms: "Rooms",
    intake: "Intake",
    about: "AboutHost",
    *,
    sources: "Sources",
    keyring: "Keyring",
) -> "tuple[Fleet, Carrying]":
    """The waves: what the API calls, and what carries them out on this host; `stack` ends the latter."""
    from synvirt.api.routes.waves import Fleet
    from synvirt.fleet.carrying import Carrying
    from synvirt.fleet.changing import failed
    from synvirt.fleet.forecasting import Forecaster
    from synvirt.fleet.host_side import HostSide
    from synvirt.fleet.listed_vms import ListedVms
    from synvirt.fleet.placing import Placing
    from synvirt.fleet.sheets.importing import SOURCES_MAX, Importer
    from synvirt.fleet.waves import Waves
    from synvirt.fleet.webhooks.deliveries import Deliveries
    from synvirt.fleet.webhooks.delivering import Delivering, Ways
    from synvirt.fleet.webhooks.events import Hooks
    from synvirt.migrations.hosts.about import host_of
    from synvirt.outgoing import Guard
    from synvirt.proof.health import Checker

    rows = rooms.store.waves
    checker = Checker(rooms.hypervisor, Guard(settings.remote_allowed_hosts), settings.remote_ca_file)
    side = HostSide(rooms, checker, cancel=intake.cancel, failed=partial(failed, rows))
    stack.callback(side.close)
    hooks = Hooks(keyring, settings.host_id, frozenset(settings.wave_commands))
    ways = Ways(Guard(settings.remote_allowed_hosts), settings.remote_ca_file, settings.wave_commands)
    delivering = Delivering(rows, rooms.store.wave_hooks, hooks, ways)
    stack.callback(delivering.close)
    listed = ListedVms(sources.rows)
    stack.callback(listed.close)
    placing = Placing(rows, lambda: [host_of(row, 0) for row in rooms.store.hosts.all()], listed.of, listed.failure_of)
    carrying = Carrying(intake, side, placing, delivering=delivering, vm_of=listed.of, unreachable=about.unreachable)
    waves = Waves(rows, changed=carrying.wake, own=hooks)
    forecaster = Forecaster(waves, rooms.store, sources.rows, host=side.host, destination=side.default_destination)
    importer = Importer(waves, lambda: sources.page(limit=SOURCES_MAX, cursor=None)[0], sources.inventory)
    deliveries = Deliveries(rooms.store.wave_hooks, changed=carrying.wake)
    return Fleet(waves, forecaster, importer, deliveries), carrying
