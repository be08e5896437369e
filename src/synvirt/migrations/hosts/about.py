"""The hosts of a fleet, for operators, and each host's description of itself."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

import structlog

from synvirt import __version__
from synvirt.destinations import Destination, free_bytes_of, shared_id_of
from synvirt.errors import Conflict, SynvirtError, not_listed
from synvirt.hypervisor import Hypervisor
from synvirt.model.values import Bytes, Model, Time
from synvirt.repeating import repeated
from synvirt.store import Store
from synvirt.store.hosts import HostRow

# How often destinations are asked, each in its own thread: a destination that hangs must not delay the lease.
ASKED_EVERY_S = 60.0
# How long a source that did not answer this host counts as out of reach from here. It may answer another host.
UNREACHABLE_FOR_S = 600.0

log = structlog.get_logger(__name__)


class HostDestination(Model):
    """A destination of a host. `free_bytes` is null where it is not known. `shared_id`: the same on all hosts that reach this
    destination; null where only this one does, or it is not known."""

    name: str
    kind: str
    free_bytes: Bytes | None
    shared_id: str | None = None


class HostRoom(Model):
    """A host's resources for guests. `free_memory_bytes`, `free_cpus`: what the running guests leave, with the overcommitment
    of its settings; negative, where they use more. `networks`: what a network card can be connected to, as in a plan.
    `unreachable_sources`: ids of sources that did not answer this host lately."""

    free_memory_bytes: int
    free_cpus: float
    networks: tuple[str, ...] = ()
    unreachable_sources: tuple[UUID, ...] = ()


HostState = Literal["alive", "away", "fenced"]


class Host(Model):
    """A host. `alive`: its lease holds; `away`: its lease is over; `fenced`: another host or an operator has fenced it, and it
    begins a new epoch when it is back. `jobs`: its unended migrations. `room`: null where it is not known."""

    id: str
    name: str
    state: HostState
    seen_at: Time
    version: str
    jobs: int
    destinations: tuple[HostDestination, ...]
    room: HostRoom | None = None


class AboutHost:
    """How this host describes itself. `document` answers at once, with what was found last."""

    def __init__(
        self,
        destinations: Mapping[str, Destination],
        hypervisor: Hypervisor,
        *,
        memory_overcommit: float = 1.0,
        cpu_overcommit: float = 8.0,
    ) -> None:
        self._destinations, self._hypervisor = destinations, hypervisor
        self._memory_overcommit, self._cpu_overcommit = memory_overcommit, cpu_overcommit
        self._room: HostRoom | None = None
        self._unreachable: dict[UUID, float] = {}
        self._lock = threading.Lock()
        self._found = [HostDestination(name=name, kind=one.kind, free_bytes=None) for name, one in destinations.items()]

    def document(self) -> str:
        """This host's description for the others, as JSON: destinations, resources for guests, sources out of reach."""
        with self._lock:
            destinations = [one.model_dump() for one in self._found]
            room = self._room
            unreachable = tuple(source for source, until in self._unreachable.items() if until > time.monotonic())
        document: dict[str, object] = {"name": socket.gethostname(), "version": __version__, "destinations": destinations}
        if room is not None:
            document["room"] = room.model_copy(update={"unreachable_sources": unreachable}).model_dump(mode="json")
        return json.dumps(document)

    def unreachable(self, source_id: UUID) -> None:
        """Notes that a source did not answer this host: for a while other hosts are preferred for it."""
        with self._lock:
            self._unreachable[source_id] = time.monotonic() + UNREACHABLE_FOR_S

    @contextmanager
    def kept(self, first: Callable[[], object]) -> Iterator[None]:
        """Keeps the description up to date while the block runs. `first` is called once there is one: nothing is placed on a
        host that has not described itself."""
        asked = False

        def ask() -> None:
            nonlocal asked
            self.ask()
            if not asked:
                asked = True
                first()

        with repeated(ask, name="about-host", every_s=ASKED_EVERY_S, ends_within_s=0.1):
            yield

    def ask(self) -> None:
        """Asks the hypervisor and each destination. It may take long, where a cluster is away."""
        room = self._asked_room()
        with self._lock:
            self._room = room
        found = [_described(name, one) for name, one in self._destinations.items()]
        with self._lock:
            # Its id stays right while it is away.
            self._found = [
                one.model_copy(update={"shared_id": one.shared_id or before.shared_id})
                for one, before in zip(found, self._found, strict=True)
            ]

    def _asked_room(self) -> HostRoom | None:
        try:
            has, networks = self._hypervisor.capacity(), self._hypervisor.networks()
        except SynvirtError as error:
            log.warning("the hypervisor does not say what this host has", cause=error.detail)
            return None
        return HostRoom(
            free_memory_bytes=int(has.memory_bytes * self._memory_overcommit) - has.guests_memory_bytes,
            free_cpus=has.cpu_count * self._cpu_overcommit - has.guests_cpus,
            networks=tuple(networks),
        )


def _described(name: str, destination: Destination) -> HostDestination:
    """One that does not answer is asked for nothing else: it may never return."""
    free_bytes = _free(destination)
    shared_id = None if free_bytes is None else _shared_id(destination)
    return HostDestination(name=name, kind=destination.kind, free_bytes=free_bytes, shared_id=shared_id)


def _free(destination: Destination) -> int | None:
    try:
        return free_bytes_of(destination)
    except SynvirtError:
        return None


def _shared_id(destination: Destination) -> str | None:
    try:
        return shared_id_of(destination)
    except SynvirtError:
        return None


class Hosts:
    """The hosts of the store. Blocks. `here`: this host's id."""

    def __init__(self, store: Store, here: str) -> None:
        self._store, self._here = store, here

    def all(self) -> list[Host]:
        """All hosts of the store, each with the number of its jobs that have not ended."""
        jobs = self._store.count_unended()
        return [host_of(row, jobs.get(row.id, 0)) for row in self._store.hosts.all()]

    def state(self, host: str) -> HostState | None:
        """Of one host; None: it was never seen on this store."""
        return next((_state(row) for row in self._store.hosts.all() if row.id == host), None)

    def fence(self, host: str) -> Host:
        """Fences a host. NotFound; Conflict, for this host itself."""
        if host == self._here:
            raise Conflict(f"{host} is this host", hint="stop its service, or ask another host to fence it")
        if not self._store.hosts.fence(host):
            raise not_listed("host", host)
        return next(one for one in self.all() if one.id == host)


def host_of(row: HostRow, jobs: int) -> Host:
    """A host as the API answers it. `jobs`: its migrations that have not ended."""
    document = json.loads(row.document)
    return Host(
        id=row.id,
        name=document.get("name", row.id),
        state=_state(row),
        seen_at=datetime.fromtimestamp(row.seen_at, UTC),
        version=document.get("version", ""),
        jobs=jobs,
        destinations=tuple(HostDestination.model_validate(one) for one in document.get("destinations", ())),
        room=None if document.get("room") is None else HostRoom.model_validate(document["room"]),
    )


def _state(row: HostRow) -> HostState:
    return "fenced" if row.fenced else "alive" if row.left_s > 0 else "away"
