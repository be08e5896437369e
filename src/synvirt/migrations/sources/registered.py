"""Sources: the registered platforms, their sealed credentials, and sessions with them.

    POST /sources ─▶ form checked ─▶ credentials sealed, the source's id bound in ─▶ a row
    a job, a test, a discovery ─▶ unsealed ─▶ the platform's adapter ─▶ connect

The methods that block say so; the others are asyncio.
"""

import asyncio
import base64
import json
import math
import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import structlog

from synvirt import outgoing
from synvirt.errors import BadRequest, Internal, InvalidPlan, SourceUnreachable
from synvirt.jobs.waiting import Waiting
from synvirt.keyring import Keyring, Replacement, Reseal
from synvirt.live import LiveAdapter, SourceAccess, VmRow
from synvirt.live.form import Form
from synvirt.live.recording import Recording, named
from synvirt.live.recording import lines as recorded
from synvirt.live.registry import Platform
from synvirt.migrations.secrets import belongs_to, sealed_elsewhere
from synvirt.migrations.sources.probing import measured_rates, probe
from synvirt.migrations.sources.trials import Trials
from synvirt.model.access import Credentials
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from synvirt.model.sources import Source, SourceChange, SourceRequest, SourceTest
from synvirt.model.values import now
from synvirt.store.sources import Sealed, SourceRows
from synvirt.transport import Recorder, tls

# The platform is asked once for a discovery with pages: the pages after the first come from the same answer.
LISTING_KEPT_S = 60.0
LISTINGS_KEPT_MAX = 32
# A repeated request for a page within this time needs no second query of thousands of VMs.
LISTING_FRESH_S = 10.0
# Thousands of VMs come in two seconds; a platform that takes longer than this has stopped answering.
ANSWER_TIMEOUT_S = 120.0
# Enough VMs to show what a site's look like; each takes several queries.
RECORDED_VMS = 50
RECORD_TIMEOUT_S = 600.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Inventory:
    """`instance_id`: as in About. `warm`: copies may be updated while the guests run."""

    source: Source
    instance_id: str
    warm: bool
    vms: tuple[VmRow, ...]


class Sources:
    """The sources of all hosts that share the store, opened by this host. `folder`: where adapters keep sockets and scratch
    files, one folder for each source. `waiting`: the jobs that wait for a source; a change of the source wakes them."""

    def __init__(
        self,
        rows: SourceRows,
        keyring: Keyring,
        *,
        host: str,
        platforms: Mapping[LiveKind, Platform],
        folder: Path,
    ) -> None:
        self._rows, self._keyring, self._host = rows, keyring, host
        self._platforms, self._folder = platforms, folder
        self.waiting = Waiting()
        # Called after a change, for holders of sessions with the source.
        self.on_change: Callable[[UUID], None] = lambda source_id: None
        self._listings: dict[UUID, tuple[float, list[VmRow]]] = {}
        self.trials = Trials(rows, host=host, open_adapter=self._adapter)
        keyring.replacement = self._replacement
        keyring.settle(self._sample())

    # ── kept (these block) ───────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: SourceRequest) -> Source:
        """Registers a source with a new id and seals its credentials. It makes no connection. BadRequest."""
        source = Source(
            id=uuid4(),
            name=request.name,
            kind=request.kind,
            endpoint=request.endpoint,
            options=request.options,
            created_at=now(),
        )
        secrets = _revealed(request.credentials)
        source = self._checked(source, secrets)
        with self._keyring.held():
            self._rows.add(source, self._sealed(source.id, secrets), host=self._host)
        log.info("source registered", source=str(source.id), kind=source.kind)
        return source

    def get(self, source_id: UUID) -> Source:
        return self._rows.get(source_id)

    def stored(self, source_id: UUID) -> tuple[Source, bytes]:
        """The source and its credentials, sealed. NotFound."""
        return self._rows.opened(source_id)

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[Source], int | None]:
        return self._rows.page(limit=limit, cursor=cursor)

    def change(
        self,
        source_id: UUID,
        asked: SourceChange,
        *,
        check: Callable[[Source, bytes], None] = lambda source, sealed: None,
    ) -> Source:
        """Changes a source. If the endpoint, login or certificate changes, the result of the old test is removed. `check`:
        raises, where the source and its sealed credentials, as they are, must not be changed so."""
        if asked.endpoint is not None and asked.credentials is None:
            raise BadRequest(
                "credentials: are required with another endpoint", hint="what was sealed for one host is not sent to another"
            )
        fields = asked.model_dump(exclude={"credentials"}, exclude_unset=True, exclude_none=True)

        def changed(before: Source, sealed: bytes) -> tuple[Source, bytes]:
            check(before, sealed)
            stale: dict[str, object] = {"last_test": None, "rates": {}} if set(fields) - {"name"} else {}
            after = before.model_copy(update={**fields, **stale})
            secrets = self._opened(source_id, sealed) if asked.credentials is None else _revealed(asked.credentials)
            after = self._checked(after, secrets)
            if asked.credentials is None:
                return after, sealed
            return after.model_copy(update={"last_test": None}), self._sealed(source_id, secrets)

        with self._keyring.held():
            source = self._rows.change(source_id, changed, host=self._host)
        self._listings.pop(source_id, None)
        self.on_change(source_id)
        self.waiting.wake(source_id)
        return source

    def remove(self, source_id: UUID, *, check: Callable[[Source, bytes], None] = lambda source, sealed: None) -> None:
        """Removes a source. Conflict, while a job that has not ended reads from it. `check`: as for a change."""
        self._rows.remove(source_id, check)
        self._listings.pop(source_id, None)
        self.on_change(source_id)
        shutil.rmtree(self._folder / str(source_id), ignore_errors=True)  # an adapter's sockets and scratch files
        log.info("source removed", source=str(source_id))

    def form(self, kind: LiveKind) -> Form[Any, Any]:
        """The form of a source of this kind. BadRequest, if the kind is not supported."""
        platform = self._platforms.get(kind)
        if platform is None:
            raise BadRequest(f"kind: {kind} is not served")
        return platform.form

    def certificate(self, source_id: UUID) -> tls.Shown:
        """The platform's present certificate, whatever is pinned. BadRequest, if the platform does not use TLS;
        SourceUnreachable."""
        source = self.get(source_id)
        reach = self.form(source.kind).place(source.endpoint).reach
        if reach is None or not reach.tls:
            raise BadRequest(f"{source.endpoint} shows no certificate: the connection does not use TLS")
        self._let_out(source)
        try:
            return tls.look(reach.host, reach.port)
        except OSError as error:
            raise SourceUnreachable(
                f"{reach.host} shows no certificate on port {reach.port}: {error.strerror or type(error).__name__}",
                hint="is it running, and is the port right?",
            ) from error

    def rotate_key(self) -> int:
        """Seals all credentials with a new key and gives the number of sources. Those that a host with another key has sealed
        stay."""

        def store(reseal: Reseal, replaced: str, by: str) -> int:
            def resealed(one: Sealed) -> bytes | None:
                try:
                    return reseal(one.sealed, belongs_to(one.owner, one.id))
                except Internal:
                    if one.host == self._host:
                        raise
                    return None

            return self._rows.reseal(resealed, replaced=replaced, by=by, host=self._host)

        count = self._keyring.rotate(store, self._sample)
        log.info("key rotated", sources=count)
        return count

    def check_opens(self, source_id: UUID) -> None:
        """NotFound; SealedElsewhere, if this host cannot open the source's credentials."""
        _, sealed = self._rows.opened(source_id)
        self._opened(source_id, sealed)

    def check_plan(self, kind: LiveKind, source_id: UUID) -> None:
        """NotFound, or InvalidPlan if the source is of another kind."""
        source = self.get(source_id)
        if source.kind != kind:
            raise InvalidPlan(
                f"source {source.name} is of kind {source.kind}, not {kind}", hint=f"submit it as {{Live: {source.kind}}}"
            )

    # ── connected ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        """The adapter of a source, not connected yet; the caller closes it."""
        await asyncio.to_thread(self.check_plan, kind, source_id)
        return await asyncio.to_thread(self._adapter, source_id)

    async def test(self, source_id: UUID, *, deep: bool = False, vm_id: str | None = None) -> SourceTest:
        """The checks in the order in which a connection is made. A failed check is an answer, not an error."""
        source, sealed_then = await asyncio.to_thread(self._rows.opened, source_id)
        adapter = await asyncio.to_thread(self._adapter, source_id)
        form = self._platforms[source.kind].form
        reach, options = form.place(source.endpoint).reach, form.read_options(source.options)
        noted = partial(self.trials.noted, source_id)
        result = await probe(adapter, reach, options, deep=deep and noted, vm_id=vm_id)

        def tested(now_: Source, sealed: bytes) -> tuple[Source, bytes]:
            """Stores the result, unless the source was changed meanwhile: then another source was tested."""
            same = (now_.endpoint, now_.options, sealed) == (source.endpoint, source.options, sealed_then)
            if not same:
                return now_, sealed
            return now_.model_copy(update={"last_test": result, "rates": measured_rates(result) or now_.rates}), sealed

        await asyncio.to_thread(self._rows.change, source_id, tested, host=self._host)
        return result

    async def list_vms(
        self, source_id: UUID, *, limit: int, cursor: str | None = None, search: str = "", age_max_s: float | None = None
    ) -> tuple[list[VmRow], str | None]:
        """A page, by name. The platform is asked again if its last answer is older than `age_max_s`: by default LISTING_FRESH_S
        for the first page, LISTING_KEPT_S for later ones. `cursor`: the place of the last VM of the page before, so that no
        page is shifted by VMs that come or go; BadRequest for a foreign one. `search`: part of a name or an id."""
        after = None if cursor is None else _place_of(cursor)
        await asyncio.to_thread(self.get, source_id)
        asked_at, rows = self._listings.get(source_id, (-math.inf, []))
        if age_max_s is None:
            age_max_s = LISTING_FRESH_S if after is None else LISTING_KEPT_S
        if time.monotonic() - asked_at >= age_max_s:
            rows = await self._asked(source_id, lambda adapter: adapter.list_vms())
            rows = sorted(rows, key=_place)
            self._listings[source_id] = (time.monotonic(), rows)
            while len(self._listings) > LISTINGS_KEPT_MAX:
                self._listings.pop(next(iter(self._listings)))
        wanted = search.casefold()
        ahead = rows if after is None else rows[bisect_right(rows, after, key=_place) :]
        found = [row for row in ahead if wanted in row.name.casefold() or wanted in row.vm_id.casefold()]
        return found[:limit], _cursor(found[limit - 1]) if len(found) > limit else None

    async def rows(self, source_id: UUID) -> dict[str, VmRow]:
        """All its VMs by their ids, at most LISTING_KEPT_S old."""
        found, _ = await self.list_vms(source_id, limit=sys.maxsize, age_max_s=LISTING_KEPT_S)
        return {row.vm_id: row for row in found}

    async def inventory(self, source_id: UUID) -> Inventory:
        """All that a list of VMs may contain, asked now."""
        source = await asyncio.to_thread(self.get, source_id)

        async def ask(adapter: LiveAdapter) -> Inventory:
            about = await adapter.about()
            return Inventory(source, about.instance_id, await adapter.supports_warm(), tuple(await adapter.list_vms()))

        return await self._asked(source_id, ask)

    async def inspect(self, source_id: UUID, vm_id: str) -> VmManifest:
        return await self._asked(source_id, lambda adapter: adapter.inspect(vm_id))

    async def record(self, source_id: UUID, vm_ids: Sequence[str] = ()) -> str:
        """The control plane's answers to all read-only requests, without secrets and names, as JSON lines. `vm_ids`: the VMs to
        be inspected; empty: the first RECORDED_VMS. BadRequest, if the platform does not use HTTP."""
        source, sealed = await asyncio.to_thread(self._rows.opened, source_id)
        secrets = self._opened(source_id, sealed)
        recording = Recording()
        adapter = self._made(source, secrets, recording)
        manifests = []
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                await adapter.connect()
                about, rows = await adapter.about(), await adapter.list_vms()
                for vm_id in list(vm_ids) or [row.vm_id for row in rows[:RECORDED_VMS]]:
                    manifests.append(await adapter.inspect(vm_id))
                    await adapter.last_start(vm_id)
        except TimeoutError as error:
            raise SourceUnreachable(f"the source was not recorded within {RECORD_TIMEOUT_S:.0f} s") from error
        finally:
            await adapter.close()
        if not recording.exchanges:
            raise BadRequest(f"{source.kind} is not recorded: our HTTP client does not connect to its control plane")
        names = [self.form(source.kind).place(source.endpoint).host or "", *named(rows, manifests)]
        return "".join(recorded(recording, source.kind, about, names, secrets.values()))

    async def _asked(self, source_id: UUID, ask: Callable[[LiveAdapter], Awaitable[T]]) -> T:
        adapter = await asyncio.to_thread(self._adapter, source_id)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await adapter.connect()
                return await ask(adapter)
        except TimeoutError as error:
            raise SourceUnreachable(f"the source did not answer within {ANSWER_TIMEOUT_S:.0f} s") from error
        finally:
            await adapter.close()

    # ── opened (these block) ─────────────────────────────────────────────────────────────────────────────────────────

    def _adapter(self, source_id: UUID) -> LiveAdapter:
        source, sealed = self._rows.opened(source_id)
        return self._made(source, self._opened(source_id, sealed))

    def _made(self, source: Source, secrets: Mapping[str, str], recorder: Recorder | None = None) -> LiveAdapter:
        self._let_out(source)
        access = SourceAccess(source.endpoint, secrets, source.options, self._folder / str(source.id), recorder)
        return self._platforms[source.kind].open(access)

    def _let_out(self, source: Source) -> None:
        """BadRequest, if connections to its host are not allowed, so that it fails early. Each connection checks again
        (outgoing.py), as a name may get another address a moment later. A name that cannot be resolved is left to the
        adapter."""
        host = self.form(source.kind).place(source.endpoint).host
        if host is not None:
            outgoing.sources().check(host)

    def _checked(self, source: Source, secrets: Mapping[str, str]) -> Source:
        """The source with its options in the platform model's form; BadRequest, if they do not fit the form."""
        access = SourceAccess(source.endpoint, secrets, source.options)
        place, _, options = self.form(source.kind).read(access)
        if place.host is not None:
            outgoing.sources().check_name(place.host)
        return source.model_copy(update={"options": options.model_dump(mode="json")})

    def _sealed(self, source_id: UUID, secrets: Mapping[str, str]) -> bytes:
        return self._keyring.seal(json.dumps(secrets).encode(), belongs_to=belongs_to("source", source_id))

    def _opened(self, source_id: UUID, sealed: bytes) -> dict[str, str]:
        try:
            opened: dict[str, str] = json.loads(self._keyring.unseal(sealed, belongs_to=belongs_to("source", source_id)))
        except Internal as error:
            raise sealed_elsewhere(f"source {source_id}") from error
        return opened

    def _replacement(self, key: str) -> Replacement | None:
        found = self._rows.replacement_of(key)
        return None if found is None else Replacement(*found)

    def _sample(self) -> tuple[bytes, bytes] | None:
        """Sealed credentials that this host's key, or the next one, opens, if there are any."""
        found = self._rows.sealed()
        samples = [(one.sealed, belongs_to(one.owner, one.id)) for one in found]
        own = [sample for one, sample in zip(found, samples, strict=True) if one.host == self._host]
        return next((sample for sample in samples if self._keyring.opens(*sample)), next(iter(own), None))


def _place(row: VmRow) -> tuple[str, str]:
    return row.name.casefold(), row.vm_id


def _cursor(row: VmRow) -> str:
    name, vm_id = _place(row)
    return base64.urlsafe_b64encode(f"{vm_id}\0{name}".encode(errors="surrogatepass")).decode()


def _place_of(cursor: str) -> tuple[str, str]:
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode(errors="surrogatepass")
    except ValueError:
        text = ""
    vm_id, zero, name = text.partition("\0")
    if not zero:
        raise BadRequest(f"cursor: {cursor[:100]!r} is not one of this service", hint="begin again without one")
    return name, vm_id


def _revealed(credentials: Credentials) -> dict[str, str]:
    return {name: secret.get_secret_value() for name, secret in credentials.items()}
