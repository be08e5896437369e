"""The hosts of a fleet, as operators see them, and what each says of itself."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from synvirt import __version__
from synvirt.destinations import Destination
from synvirt.errors import Conflict, NotFound, SynvirtError
from synvirt.model.values import Bytes, Model, Time
from synvirt.repeating import repeated
from synvirt.store import Store
from synvirt.store.hosts import HostRow

# A destination that hangs must not hold up the lease: each is asked in a thread of its own, now and again.
ASKED_EVERY_S = 60.0


class HostDestination(Model):
    """`free_bytes` is null where the host could not say. `shared_id`: the same on each host that reaches this destination; null
    where only this one does, or it could not say."""

    name: str
    kind: str
    free_bytes: Bytes | None
    shared_id: str | None = None


class Host(Model):
    """`alive`: its lease holds. `away`: it is over. `fenced`: another host, or an operator, has said that it may not go on; it
    begins anew once it is back. `jobs`: its migrations that have not ended."""

    id: str
    name: str
    state: Literal["alive", "away", "fenced"]
    seen_at: Time
    version: str
    jobs: int
    destinations: tuple[HostDestination, ...]


class AboutHost:
    """What this host says of itself: `document` answers at once, with what was found last."""

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        self._destinations = destinations
        self._lock = threading.Lock()
        self._found = [HostDestination(name=name, kind=one.kind, free_bytes=None) for name, one in destinations.items()]

    def document(self) -> str:
        with self._lock:
            destinations = [one.model_dump() for one in self._found]
        return json.dumps({"name": socket.gethostname(), "version": __version__, "destinations": destinations})

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Up to date, as long as the block lasts."""
        with repeated(self.ask, name="about-host", every_s=ASKED_EVERY_S, ends_within_s=0.1):
            yield

    def ask(self) -> None:
        """Of each destination what it says now. It may take as long as a cluster that is away."""
        found = [
            HostDestination(name=name, kind=one.kind, free_bytes=_free(one), shared_id=_shared_id(one))
            for name, one in self._destinations.items()
        ]
        with self._lock:
            # What it once said of itself is so while it is away, too.
            self._found = [
                one.model_copy(update={"shared_id": one.shared_id or before.shared_id})
                for one, before in zip(found, self._found, strict=True)
            ]


def _free(destination: Destination) -> int | None:
    try:
        return destination.free_bytes()
    except SynvirtError:
        return None


def _shared_id(destination: Destination) -> str | None:
    try:
        return destination.shared_id()
    except SynvirtError:
        return None


class Hosts:
    """Blocks. `here` is this host's id."""

    def __init__(self, store: Store, here: str) -> None:
        self._store, self._here = store, here

    def all(self) -> list[Host]:
        jobs = self._store.count_unended()
        return [_host(row, jobs.get(row.id, 0)) for row in self._store.hosts.all()]

    def fence(self, host: str) -> Host:
        """NotFound; Conflict for this host itself."""
        if host == self._here:
            raise Conflict(f"{host} is this host", hint="stop its service, or ask another host to fence it")
        if not self._store.hosts.fence(host):
            raise NotFound(f"there is no host {host}", hint="see `synvirt hosts list`")
        return next(one for one in self.all() if one.id == host)


def _host(row: HostRow, jobs: int) -> Host:
    said = json.loads(row.document)
    return Host(
        id=row.id,
        name=said.get("name", row.id),
        state="fenced" if row.fenced else "alive" if row.left_s > 0 else "away",
        seen_at=datetime.fromtimestamp(row.seen_at, UTC),
        version=said.get("version", ""),
        jobs=jobs,
        destinations=tuple(HostDestination.model_validate(one) for one in said.get("destinations", ())),
    )
