"""The only module that names concrete classes and puts them together: the service, and the command line with it.

Heavy modules are imported where they are used, so that `synvirt --help` has nothing to wait for.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn
from uuid import UUID

import typer

from synvirt.cli import app
from synvirt.cli.completion import VARIABLE
from synvirt.cli.interrupts import end_at_once
from synvirt.cli.named import named
from synvirt.cli.options import Options, with_options

if TYPE_CHECKING:
    from fastapi import APIRouter

    from synvirt.api.routes.waves import Fleet
    from synvirt.api.server import Server
    from synvirt.backups.service import Backups
    from synvirt.destinations import Destination
    from synvirt.doctor import Checkup
    from synvirt.fleet.carrying import Carrying
    from synvirt.jobs.board import Board
    from synvirt.jobs.lease import Pausable
    from synvirt.jobs.looking import CagedLooking, Looking
    from synvirt.keyring import Keyring
    from synvirt.migrations.engine import Engine
    from synvirt.migrations.hosts import AboutHost
    from synvirt.migrations.planning.intake import Intake
    from synvirt.migrations.removing import Removal
    from synvirt.migrations.rooms import Rooms
    from synvirt.migrations.secrets import JobSecrets
    from synvirt.migrations.sources.registered import Sources
    from synvirt.migrations.taking_over import TakingOver
    from synvirt.migrations.uploads import Uploads
    from synvirt.model.job import Migration
    from synvirt.privileged import Privileged
    from synvirt.proof.keeping import Receipts
    from synvirt.rehearsals.asking import Rehearsing
    from synvirt.rehearsals.engine import Rehearsals
    from synvirt.settings import DestinationSetting, Settings
    from synvirt.store import Store


@dataclass(frozen=True)
class Service:
    server: "Server"
    rooms: "Rooms"

    @property
    def address(self) -> str:
        return self.server.address

    def run(self, *, on_ready: Callable[[], None]) -> None:
        self.server.run(on_ready=on_ready)

    def stop(self) -> None:
        self.server.stop()

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        return self.rooms.hypervisor.read_guest_file(uuid, path)

    def remove(self, job: "Migration") -> None:
        """What a completed job made here."""
        if job.domain is not None:
            self.rooms.hypervisor.undefine(UUID(job.domain.uuid), job.id)
        for disk in job.disks:
            if disk.volume is not None:
                self.rooms.destination_named(job.destination).destroy(disk.volume)


@contextmanager
def service(settings: "Settings", *, announce: Callable[[str], None]) -> "Iterator[Service]":
    """A service on settings.data_dir, its jobs running, its sockets bound: `run()` it. All is let go of at the end.

    The order matters: one service a folder (the lock) before anything of it is opened; the sockets before the jobs, so that
    whoever cannot listen has begun nothing.
    """
    from synvirt.api.app import create_app
    from synvirt.api.callers.auth import authenticator
    from synvirt.api.routes.backups import mount
    from synvirt.api.routes.waves import mount_waves
    from synvirt.api.server import Server, data_dir_locked
    from synvirt.doctor import Checkup
    from synvirt.jobs.board import Board
    from synvirt.keyring import Keyring
    from synvirt.live.vsphere.session import warn_if_missing
    from synvirt.migrations.hosts import AboutHost
    from synvirt.migrations.planning.foreseen import dry_run
    from synvirt.migrations.planning.intake import Intake, check_corrected, check_free, check_plan
    from synvirt.migrations.secrets import JobSecrets
    from synvirt.migrations.sources.trials import swept as trials_swept
    from synvirt.migrations.uploads import Uploads, swept
    from synvirt.settings import prepare_data_dir
    from synvirt.store import Store

    prepare_data_dir(settings)
    with ExitStack() as stack:
        stack.enter_context(data_dir_locked(settings.data_dir))
        warn_if_missing()
        keyring = Keyring(settings.keyring_dir / "migrator.key")
        board = Board()
        store = Store(settings.store_url, on_commit=board.committed)
        stack.callback(store.close)
        uploads = Uploads(store.uploads, settings)
        sources = _sources(settings, store, keyring)
        secrets = JobSecrets(store, keyring)
        looking = _looking(stack)
        rooms = _rooms(settings, store, board, uploads, sources=sources, secrets=secrets, looking=looking)
        stack.callback(rooms.hypervisor.close)
        about = AboutHost(
            rooms.destinations,
            rooms.hypervisor,
            memory_overcommit=settings.memory_overcommit,
            cpu_overcommit=settings.cpu_overcommit,
        )
        engine, kinds, taking_over = _engine(stack, settings, rooms, about, sources=sources, secrets=secrets)
        removal = _removal(stack, rooms, settings)
        intake = Intake(
            store,
            board,
            host=settings.host_id,
            check=lambda plan: check_plan(rooms, plan),
            begin=engine.begin,
            wake=engine.wake,
            secrets=secrets,
            removal=removal,
            dry_run=partial(dry_run, rooms),
            check_corrected=partial(check_corrected, rooms),
            claim=partial(check_free, rooms),
            taking_over=taking_over,
        )
        rehearsing, rehearsals = _rehearsals(settings, rooms, engine)
        fleet, carrying = _waves(stack, settings, rooms, intake, about, sources=sources, keyring=keyring)
        checkup = Checkup(settings)
        checkup.begin()
        backups = _backups(stack, settings, store, rooms)
        kinds += [rehearsals, carrying, backups]
        app = create_app(
            intake,
            settings,
            authenticate=authenticator(settings, announce=announce, privileged=_privileged(settings)),
            routers=_routers(settings, store, rooms, uploads=uploads, sources=sources, looking=looking, rehearsing=rehearsing),
            pages=_pages(
                intake,
                settings,
                rooms,
                checkup,
                sources=sources,
                uploads=uploads,
                keyring=keyring,
                backups=backups,
                looking=looking,
                fleet=fleet,
                rehearsing=rehearsing,
            ),
            checkup=checkup.latest,
        )
        mount(app, backups, settings)
        mount_waves(app, fleet, board, settings)
        server = Server(app, settings)
        stack.enter_context(swept(uploads))
        stack.enter_context(trials_swept(sources.trials))
        _begin(stack, engine, rehearsals, carrying, taking_over, among_hosts=bool(settings.database_url))
        yield Service(server, rooms)


def _sources(settings: "Settings", store: "Store", keyring: "Keyring") -> "Sources":
    from synvirt import outgoing
    from synvirt.live.registry import BY_KIND as PLATFORMS
    from synvirt.migrations.sources.registered import Sources

    outgoing.permit(settings.source_allowed_hosts)
    return Sources(store.sources, keyring, host=settings.host_id, platforms=PLATFORMS, folder=settings.data_dir / "sources")


def _privileged(settings: "Settings") -> "Privileged":
    from synvirt.privileged.asking import ByHelper
    from synvirt.privileged.here import Here

    return Here(settings.pam_service) if settings.helper_socket is None else ByHelper(settings.helper_socket)


def _looking(stack: ExitStack) -> "CagedLooking":
    from synvirt.jobs.looking import CagedLooking

    looking = CagedLooking()
    stack.callback(looking.close)
    looking.begin()
    return looking


def _engine(
    stack: ExitStack, settings: "Settings", rooms: "Rooms", about: "AboutHost", *, sources: "Sources", secrets: "JobSecrets"
) -> "tuple[Engine, list[Pausable], TakingOver]":
    """Not started yet. From here on this process writes to the store under a lease of its host, and the kinds of jobs in the
    list run while it holds. Conflict, where another process has it already."""
    from synvirt.jobs.lease import HostLease, Pausable, Together
    from synvirt.migrations.engine import Engine
    from synvirt.migrations.taking_over import TakingOver

    engine = Engine(rooms, host=settings.host_id)
    sources.on_change = rooms.sessions.changed
    kinds: list[Pausable] = [engine]
    together = Together(kinds)
    lease = HostLease(rooms.store, settings.host_id, document=about.document, on_lost=together.pause, on_held=together.resume)
    lease.begin()
    stack.callback(lease.close)
    stack.enter_context(about.kept())
    taking_over = TakingOver(
        rooms,
        begin=engine.begin,
        held_for_s=lease.held_for_s,
        opens_source=sources.check_opens,
        secrets=secrets,
        on_host_lost=settings.on_host_lost,
    )
    return engine, kinds, taking_over


def _begin(
    stack: ExitStack,
    engine: "Engine",
    rehearsals: "Rehearsals",
    carrying: "Carrying",
    taking_over: "TakingOver",
    *,
    among_hosts: bool,
) -> None:
    """Jobs go on from here, and waves with them."""
    from synvirt.fleet.carrying import carried
    from synvirt.migrations.taking_over import looking

    engine.start()
    stack.callback(engine.close)
    rehearsals.start()
    stack.callback(rehearsals.close)
    stack.enter_context(carried(carrying))
    stack.enter_context(looking(taking_over, among_hosts=among_hosts))


def _rehearsals(settings: "Settings", rooms: "Rooms", engine: "Engine") -> "tuple[Rehearsing, Rehearsals]":
    from synvirt.rehearsals.asking import Rehearsing
    from synvirt.rehearsals.engine import Rehearsals

    rehearsals = Rehearsals(rooms, settings.remote_ca_file, settings.data_dir / "rehearsals")
    rehearsing = Rehearsing(
        rooms.store, rehearsals, host=rooms.host, destination_named=rooms.destination_named, wake=engine.wake
    )
    return rehearsing, rehearsals


def _waves(
    stack: ExitStack,
    settings: "Settings",
    rooms: "Rooms",
    intake: "Intake",
    about: "AboutHost",
    *,
    sources: "Sources",
    keyring: "Keyring",
) -> "tuple[Fleet, Carrying]":
    from synvirt.api.routes.waves import Fleet
    from synvirt.fleet.carrying import Carrying, failed
    from synvirt.fleet.forecasting import Forecaster
    from synvirt.fleet.host_side import HostSide
    from synvirt.fleet.listed_vms import ListedVms
    from synvirt.fleet.placing import Placing
    from synvirt.fleet.sheets.importing import SOURCES_MAX, Importer
    from synvirt.fleet.waves import Waves
    from synvirt.fleet.webhooks.deliveries import Deliveries
    from synvirt.fleet.webhooks.delivering import Delivering, Ways
    from synvirt.fleet.webhooks.events import Hooks
    from synvirt.migrations.hosts import host_of
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
    placing = Placing(rows, lambda: [host_of(row, 0) for row in rooms.store.hosts.all()], listed.of)
    carrying = Carrying(intake, side, placing, delivering=delivering, vm_of=listed.of, unreachable=about.unreachable)
    waves = Waves(rows, changed=carrying.wake, own=hooks)
    forecaster = Forecaster(waves, rooms.store, sources.rows, host=side.host, destination=side.default_destination)
    importer = Importer(waves, lambda: sources.page(limit=SOURCES_MAX, cursor=None)[0], sources.inventory)
    deliveries = Deliveries(rooms.store.wave_hooks, changed=carrying.wake)
    return Fleet(waves, forecaster, importer, deliveries), carrying


def _removal(stack: ExitStack, rooms: "Rooms", settings: "Settings") -> "Removal":
    from synvirt.api.routes.audit import expiring
    from synvirt.migrations.removing import Removal, retained, volumes_of

    def destroy(job: "Migration") -> None:
        for volume in volumes_of(job):
            rooms.destination_named(job.destination).destroy(volume)

    def forget(job: "Migration") -> None:
        rooms.hypervisor.forget_screenshot(job.id)
        if rooms.receipts is not None:
            rooms.receipts.forget_hashes(job.id)

    removal = Removal(rooms.store, here=settings.host_id, destroy=destroy, forget=forget)
    stack.enter_context(retained(removal, settings.keep_ended_days))
    stack.enter_context(expiring(rooms.store.audit, settings.audit_keep_days))
    return removal


def _routers(
    settings: "Settings",
    store: "Store",
    rooms: "Rooms",
    *,
    uploads: "Uploads",
    sources: "Sources",
    looking: "Looking",
    rehearsing: "Rehearsing",
) -> "tuple[APIRouter, ...]":
    from synvirt.api.routes.destinations import destinations_router
    from synvirt.api.routes.host_files import host_files_router
    from synvirt.api.routes.hosts import hosts_router
    from synvirt.api.routes.receipts import receipts_router
    from synvirt.api.routes.rehearsals import rehearsals_router
    from synvirt.api.routes.remote_files import remote_files_router
    from synvirt.api.routes.screenshots import screenshots_router
    from synvirt.api.routes.sources import sources_router
    from synvirt.api.routes.uploads import uploads_router
    from synvirt.migrations.hosts import Hosts

    free_bytes = rooms.destination.free_bytes
    return (
        host_files_router(settings.imports_dir, free_bytes=free_bytes, looking=looking),
        uploads_router(uploads, free_bytes=free_bytes, looking=looking),
        sources_router(sources),
        destinations_router(rooms.destinations),
        hosts_router(Hosts(store, settings.host_id)),
        screenshots_router(store, rooms.hypervisor.screenshot),
        receipts_router(store, rooms.receipts),
        rehearsals_router(rehearsing),
        remote_files_router(rooms.remote_rules, free_bytes=free_bytes, looking=looking),
    )


def _pages(
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
) -> "Callable[[Callable[[], bool]], tuple[APIRouter, ...]]":
    from synvirt.web import web_routers
    from synvirt.web.finding import Finder

    finder = Finder(sources, uploads, rooms.destinations, rooms.remote_rules, keyring, looking)
    return lambda stopping: web_routers(
        intake,
        settings,
        screenshot=rooms.hypervisor.screenshot,
        networks=rooms.hypervisor.networks,
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


def _backups(stack: ExitStack, settings: "Settings", store: "Store", rooms: "Rooms") -> "Backups":
    from synvirt.backups.authors import Authors
    from synvirt.backups.limits import Limits
    from synvirt.backups.offers import offers_of
    from synvirt.backups.repositories import Repositories
    from synvirt.backups.restores.host import RestoreHost
    from synvirt.backups.service import Backups, running
    from synvirt.backups.sources import guest as source
    from synvirt.backups.sources.ways import scratch_folder, sources_of, tpm_folder
    from synvirt.backups.working import Working
    from synvirt.kvm.connection import Connection
    from synvirt.proof.signing import HostKey

    # A connection of its own, opened by the first run: the embedded driver is opened once a process, and shared.
    connection = Connection(settings.hypervisor_uri, lambda: None)
    stack.callback(connection.close)
    guests = stack.enter_context(source.running(sources_of(connection, store.backups, host=settings.host_id)))
    backups = Backups(
        store.backups,
        Repositories(
            store.backups,
            host=settings.host_id,
            keyring=settings.keyring_dir,
            caches=settings.data_dir / "backups",
            allowed_hosts=settings.source_allowed_hosts,
            authors=Authors(HostKey(settings.keyring_dir / "receipts.key", settings.host_id), settings.backup_signers),
        ),
        host=settings.host_id,
        open_guest=guests.open,
        guest_id=guests.id_of,
        forget_job=guests.forget,
        working=Working(threads=settings.copy_threads),
        journals=settings.data_dir / "backups",
        offers=offers_of(settings),
        limits=Limits(
            rooms.slots,
            settings.host_id,
            per_repository=settings.runs_per_repository,
            per_host=settings.backups_at_once,
            per_destination=settings.jobs_per_destination,
        ),
        exports=settings.data_dir / "exports",
        export_roots=settings.backup_export_roots,
        restore_host=RestoreHost(
            hypervisor=rooms.hypervisor,
            connection=connection,
            destinations=rooms.destinations,
            tpm_folder=partial(tpm_folder, connection),
            scratch=lambda: scratch_folder(connection) / "boot-tests",
            screens=settings.data_dir / "boot-tests",
            boot_timeout_s=settings.boot_timeout_s,
            alone=guests.alone,
        ),
    )
    return stack.enter_context(running(backups))


def _rooms(
    settings: "Settings",
    store: "Store",
    board: "Board",
    uploads: "Uploads",
    *,
    sources: "Sources",
    secrets: "JobSecrets",
    looking: "CagedLooking",
) -> "Rooms":
    from synvirt.disks.beneath import resolve_beneath
    from synvirt.fleet.sharing import rate_of
    from synvirt.guests.virt_v2v import VirtV2vInPlace
    from synvirt.hypervisor.accel import accelerator
    from synvirt.hypervisor.libvirt_host import LibvirtHost
    from synvirt.jobs.slots import Slots, Turns
    from synvirt.migrations.rooms import Rooms
    from synvirt.model.kinds import OfflineKind
    from synvirt.offline.elsewhere import Rules
    from synvirt.offline.hyperv.tool import vmcx_tool

    root = settings.imports_dir
    destinations = _destinations(settings)
    _say_who_guests_are(settings)
    return Rooms(
        store=store,
        board=board,
        import_root=root,
        resolve=lambda path: resolve_beneath(root, path),
        upload_path=lambda upload_id: uploads.get(upload_id).path,
        importers=looking.importers,
        detect=looking.detect,
        connected=lambda root: nullcontext(),
        secret_of=secrets.opened,
        remote_rules=Rules(settings.remote_allowed_hosts, settings.remote_ca_file),
        connect=sources.connect,
        waiting=sources.waiting,
        check_source=sources.check_plan,
        rates_of=lambda source_id: sources.get(source_id).rates,
        host=settings.host_id,
        slots=Slots(store.slots, host=settings.host_id),
        jobs_per_source=settings.jobs_per_source,
        jobs_per_source_in_all=settings.jobs_per_source_in_all,
        jobs_per_destination=settings.jobs_per_destination,
        turns=Turns(settings.jobs_at_once),
        destinations=destinations,
        hypervisor=LibvirtHost(
            settings.hypervisor_uri,
            settings.data_dir,
            boot_check=settings.boot_check,
            boot_activity_s=settings.boot_activity_s,
        ),
        preparer=VirtV2vInPlace(
            settings.data_dir / "conversions",
            settings.virtio_win_iso,
            settings.virt_tools_dir,
            kvm=lambda: accelerator(settings.data_dir / "libvirt").kind == "kvm",
        ),
        rate_of=partial(rate_of, store.waves),
        receipts=_receipts(settings) if settings.receipts else None,
        passthroughs={OfflineKind.VMCX_EXPORT: vmcx_tool(settings)},
        boot_timeout_s=settings.boot_timeout_s,
        copy_threads=settings.copy_threads,
    )


def _receipts(settings: "Settings") -> "Receipts":
    from synvirt.proof.keeping import Receipts
    from synvirt.proof.signing import HostKey
    from synvirt.proof.stamping import TimeStamps

    key = HostKey(settings.keyring_dir / "receipts.key", settings.host_id)
    stamps = TimeStamps(settings.receipt_tsa, settings.receipt_tsa_roots) if settings.receipt_tsa else None
    return Receipts(settings.receipts_dir, key, stamps)


def _destinations(settings: "Settings") -> "dict[str, Destination]":
    return {name: _destination(chosen) for name, chosen in settings.destinations_by_name.items()}


def _destination(chosen: "DestinationSetting") -> "Destination":
    from synvirt.destinations.directory import DirectoryDestination
    from synvirt.destinations.zfs import ZfsDestination
    from synvirt.disks.specs import RbdPlace
    from synvirt.kvm import qemu_user

    match chosen.kind:
        case "directory":
            qemu_user.make(chosen.path)
            return DirectoryDestination(chosen.path)
        case "zfs":
            return ZfsDestination(chosen.pool, chosen.namespace)
        case "rbd":
            from synvirt.destinations.rbd import RbdDestination

            place = RbdPlace(conf=str(chosen.conf), client=chosen.client, pool=chosen.pool)
            return RbdDestination(place)


def _say_who_guests_are(settings: "Settings") -> None:
    """And have it so, before the driver is opened."""
    import structlog

    from synvirt.kvm import qemu_user

    made = qemu_user.decide(settings)
    log = structlog.get_logger("synvirt.hypervisor")
    if made.lacking:
        log.warning("guests of the embedded driver are not confined as they could be", why=made.why, hint="synvirt doctor")
    else:
        log.info("guests of the embedded driver", why=made.why)


def _say_layers() -> None:
    import structlog

    from synvirt.cage import layers

    found = layers()
    log = structlog.get_logger("synvirt.cage")
    log.info("readers are confined by", layers=[name for name, there in found.items() if there])
    if missing := [name for name, there in found.items() if not there]:
        log.warning("this host lacks layers that would confine readers", layers=missing, hint="synvirt doctor")


Listen = Annotated[
    str | None, typer.Option("--listen", help="HOST:PORT to listen on; 127.0.0.1:8441 where no setting says else")
]


@app.command()
@with_options
def serve(
    options: Options,
    listen: Listen = None,
) -> None:
    """Run the service until Ctrl-C or SIGTERM; its jobs go on at the next start.

    Example: synvirt serve --data-dir /var/lib/synvirt --listen 0.0.0.0:8441
    """
    end_at_once()
    os.umask(0o027)  # whatever folder it is given: what the service makes there is not for everybody
    from synvirt.logs import log_to
    from synvirt.settings import load

    settings = load(config=options.config, flags={"data_dir": options.data_dir, "listen": listen})
    log_to(settings.log_level, sys.stderr)
    _say_layers()
    with service(settings, announce=partial(typer.echo, err=True)) as running:
        running.run(on_ready=lambda: typer.echo(f"SynVirt serves at {running.address}", err=True))
    _leave(0)


@app.command()
@with_options
def demo(
    options: Options,
    listen: Listen = None,
    payload_mib: Annotated[int, typer.Option(min=1, max=65536, help="MiB of real files on the sample's disk")] = 64,
) -> None:
    """Make a sample appliance, import it, see it boot.

    In a terminal the service is left running until Ctrl-C; elsewhere it ends by itself. Example: synvirt demo --payload-mib 512
    """
    from synvirt.cli.demo import demo as run_demo
    from synvirt.logs import log_to
    from synvirt.settings import load, prepare_data_dir

    os.umask(0o027)  # as `serve`
    # What the guest has on its disk is asked of its agent.
    settings = load(config=options.config, flags={"data_dir": options.data_dir, "listen": listen, "boot_check": "agent"})
    prepare_data_dir(settings)
    # The story is told on the terminal: the service's own lines go beside it.
    log_to(settings.log_level, (settings.data_dir / "demo.log").open("a"))
    done = run_demo(
        lambda chosen: service(chosen, announce=partial(typer.echo, err=True)),
        settings,
        payload_mib=payload_mib,
        stay=sys.stdout.isatty() and sys.stdin.isatty(),
    )
    _leave(0 if done else 1)


def _leave(code: int) -> NoReturn:
    """A step may be waiting in a thread, for a guest to boot: Python would wait for it, and there is nothing to wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    # A shell that completes a line does not give it as arguments.
    (app if VARIABLE in os.environ else named(app, sys.argv[1:]))()
