"""The service: put together, started and ended in the right order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from synvirt.main.backups import make_backups
from synvirt.main.fleet import make_fleet
from synvirt.main.migrations import make_engine, make_intake, make_rehearsals, make_removal, make_rooms, make_sources
from synvirt.main.ways_in import make_pages, make_routers

if TYPE_CHECKING:
    from synvirt.api.server import Server
    from synvirt.fleet.carrying import Carrying
    from synvirt.jobs.inspecting.looking import CagedLooking
    from synvirt.migrations.engine import Engine
    from synvirt.migrations.hosts.taking_over import TakingOver
    from synvirt.migrations.rooms import Rooms
    from synvirt.model.job import Migration
    from synvirt.privileged import Privileged
    from synvirt.rehearsals.engine import Rehearsals
    from synvirt.settings import Settings


@dataclass(frozen=True)
class Service:
    """The service, ready to run."""

    server: "Server"
    rooms: "Rooms"
    base_url: str

    @property
    def address(self) -> str:
        """Where the page is, with any {base_url}; `--server` takes it, too."""
        path = self.base_url.strip("/")
        return f"{self.server.address}/{path}/" if path else self.server.address

    def run(self, *, on_ready: Callable[[], None]) -> None:
        self.server.run(on_ready=on_ready)

    def stop(self) -> None:
        self.server.stop()

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        return self.rooms.hypervisor.read_guest_file(uuid, path)

    def remove(self, job: "Migration") -> None:
        """Removes what an ended job made here, and left. Idempotent."""
        if job.domain is not None:
            self.rooms.hypervisor.undefine(UUID(job.domain.uuid), job.id)
        for disk in job.disks:
            if disk.volume is not None:
                self.rooms.destination_named(job.destination).destroy(disk.volume)


@contextmanager
def service(settings: "Settings", *, announce: Callable[[str], None]) -> "Iterator[Service]":
    """A service on settings.data_dir, its jobs running, its sockets bound: `run()` it. All is let go of at the end.

    The order matters: one service a folder (the lock) before anything of it is opened; then the sockets are bound, so that who
    cannot listen has changed nothing and shown no password.
    """
    from synvirt.api import Listening, Server, authenticator, create_app, data_dir_locked
    from synvirt.api.callers.coming import counts_written
    from synvirt.api.routes.backups import mount
    from synvirt.api.routes.waves import mount_waves
    from synvirt.doctor import Checkup
    from synvirt.jobs.board import Board
    from synvirt.keyring import Keyring
    from synvirt.live.vsphere.session import warn_if_missing
    from synvirt.migrations.hosts.about import AboutHost
    from synvirt.migrations.secrets import JobSecrets
    from synvirt.migrations.sources.trials import swept as trials_swept
    from synvirt.migrations.uploads import Uploads, swept
    from synvirt.settings.data_dir import prepare_data_dir
    from synvirt.store import Store

    prepare_data_dir(settings)
    check_files(settings)
    with ExitStack() as stack:
        stack.enter_context(data_dir_locked(settings.data_dir))
        sockets = stack.enter_context(closing(Listening(settings)))
        _sweep()
        warn_if_missing()
        keyring = Keyring(settings.keyring_dir / "migrator.key")
        board = Board()
        store = Store(settings.store_url, on_commit=board.committed)
        stack.callback(store.close)
        uploads = Uploads(store.uploads, settings)
        sources = make_sources(settings, store, keyring)
        secrets = JobSecrets(store, keyring)
        looking = _looking(stack)
        rooms = make_rooms(settings, store, board, uploads, sources=sources, secrets=secrets, looking=looking)
        stack.callback(rooms.hypervisor.close)
        about = AboutHost(
            rooms.destinations,
            rooms.hypervisor,
            memory_overcommit=settings.memory_overcommit,
            cpu_overcommit=settings.cpu_overcommit,
        )
        engine, kinds, taking_over, lease = make_engine(stack, settings, rooms, about, sources=sources, secrets=secrets)
        removal = make_removal(stack, rooms, settings)
        intake = make_intake(store, board, settings, rooms, engine, secrets=secrets, removal=removal, taking_over=taking_over)
        rehearsing, rehearsals = make_rehearsals(settings, rooms, engine)
        fleet, carrying = make_fleet(stack, settings, rooms, intake, about, sources=sources, keyring=keyring)
        checkup = Checkup(settings)
        checkup.begin()
        backups = make_backups(stack, settings, store, rooms, looking=looking, lease=lease)
        kinds += [rehearsals, carrying, backups]
        app = create_app(
            intake,
            settings,
            authenticate=authenticator(settings, announce=announce, privileged=_privileged(settings)),
            routers=make_routers(
                settings, store, rooms, uploads=uploads, sources=sources, looking=looking, rehearsing=rehearsing
            ),
            pages=make_pages(
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
        server = Server(app, settings, sockets)
        for going_on in (counts_written(app.state.coming), swept(uploads), trials_swept(sources.trials)):
            stack.enter_context(going_on)
        _begin(stack, engine, rehearsals, carrying, taking_over, among_hosts=bool(settings.database_url))
        yield Service(server, rooms, settings.base_url)


def _sweep() -> None:
    """Removes the folders that killed services left."""
    from synvirt.cage import scratch
    from synvirt.live.folder import sweep_folders

    scratch.sweep()
    sweep_folders()


def check_files(settings: "Settings") -> None:
    """BadRequest: the store's folder is not there; or remote_ca_file cannot be used, which a job would see only when it reads a
    file by https."""
    from synvirt.errors import BadRequest
    from synvirt.settings import starting

    starting.check_database(settings)
    try:
        starting.check_authorities(settings)
    except PermissionError as error:
        raise BadRequest(f"setting remote_ca_file: {settings.remote_ca_file} cannot be read: {error.strerror}") from error


def _privileged(settings: "Settings") -> "Privileged":
    from synvirt.privileged.asking import ByHelper
    from synvirt.privileged.here import Here

    return Here(settings.pam_service) if settings.helper_socket is None else ByHelper(settings.helper_socket)


def _looking(stack: ExitStack) -> "CagedLooking":
    from synvirt.jobs.inspecting.looking import CagedLooking

    looking = CagedLooking()
    stack.callback(looking.close)
    looking.begin()
    return looking


def _begin(
    stack: ExitStack,
    engine: "Engine",
    rehearsals: "Rehearsals",
    carrying: "Carrying",
    taking_over: "TakingOver",
    *,
    among_hosts: bool,
) -> None:
    """Starts jobs and waves: they go on from now on."""
    from synvirt.fleet.carrying import carried
    from synvirt.migrations.hosts.taking_over import looking

    engine.start()
    stack.callback(engine.close)
    rehearsals.start()
    stack.callback(rehearsals.close)
    stack.enter_context(carried(carrying))
    stack.enter_context(looking(taking_over, among_hosts=among_hosts))
