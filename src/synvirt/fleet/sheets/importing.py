"""Waves from a spreadsheet, or from a query: the sources' lists, joined with the sheet's rows, and one draft for each wave.

    content ─▶ `sheets.take_in`, with the VMs of all sources ─▶ a request a wave ─▶ drafts, all of them or none

If a row is wrong, sources that did not answer are named: its VM may be one of theirs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from pydantic import ValidationError

from synvirt.errors import BadRequest, Conflict, InvalidPlan, SourceUnreachable, SynvirtError
from synvirt.fleet.model import Group, MemberRequest, Wave, WaveRequest, WaveState
from synvirt.fleet.querying import VmQuery, wave_of_query
from synvirt.fleet.sheets.rows import KnownVm, SheetProblem, TakenIn, from_json, take_in, to_json
from synvirt.fleet.waves import Waves, check, with_settings_of
from synvirt.migrations.sources.registered import Inventory
from synvirt.mistakes import place, worded
from synvirt.model.kinds import Mode
from synvirt.model.plan import LiveVmRef, MigrationPlan, PlanSource
from synvirt.model.sources import Source
from synvirt.model.values import Model

# Lists of thousands of VMs come in seconds; the caller waits for the slowest source.
SOURCE_WITHIN_S: Final = 40.0
# Each reads up to 64 MiB, and its child takes up to 1 GiB.
AT_ONCE: Final = 1
# Enough to correct at one time; a dry run lists them all.
PROBLEMS_LISTED: Final = 5
# One page of sources: more than any site has.
SOURCES_MAX: Final = 1000
UNNAMED: Final = "imported"


class ImportedWave(Model):
    """`id` is null in a dry run. `members`: how many."""

    id: UUID | None
    name: str
    members: int


class WaveImport(Model):
    """`left_out`: templates. `problems`: all that is wrong with the sheet; where there are any, no wave was made."""

    waves: tuple[ImportedWave, ...] = ()
    left_out: tuple[str, ...] = ()
    problems: tuple[SheetProblem, ...] = ()


class Importer:
    """`sources`: all of them, blocking; `inventory`: the VMs of one source."""

    def __init__(
        self,
        waves: Waves,
        sources: Callable[[], Sequence[Source]],
        inventory: Callable[[UUID], Awaitable[Inventory]],
    ) -> None:
        self._waves, self._sources, self._inventory = waves, sources, inventory
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def take(self, content: bytes, *, name: str | None, into: UUID | None, dry_run: bool) -> WaveImport:
        """Imports a sheet, or says what is wrong with it: then nothing was changed. `name`: for rows that name no wave. `into`:
        a draft whose members are replaced; its windows, limits, canary and webhooks stay. BadRequest, if it cannot be read;
        Conflict, if the draft was begun or changed meanwhile; InvalidPlan, NotFound."""
        seen = None if into is None else await asyncio.to_thread(self._draft, into)
        requests, left_out, problems = await self._read(content, name, seen)
        if not problems:
            problems = await asyncio.to_thread(_checked, requests)
        made: list[UUID | None] = [None] * len(requests)
        if not problems and not dry_run:
            made = await asyncio.to_thread(self._kept, requests, seen)
        waves = [
            ImportedWave(id=wave_id, name=one.name, members=len(one.members))
            for wave_id, one in zip(made, requests, strict=True)
        ]
        return WaveImport(waves=tuple(waves), left_out=left_out, problems=tuple(problems))

    async def select(self, query: VmQuery, *, dry_run: bool) -> WaveImport:
        """A draft of all VMs of a source that match. BadRequest, if none does; NotFound, SourceUnreachable, AuthFailed."""
        request = await self.meant(query)
        made = None if dry_run else (await asyncio.to_thread(self._waves.create, request)).id
        return WaveImport(waves=(ImportedWave(id=made, name=request.name, members=len(request.members)),))

    async def meant(self, query: VmQuery) -> WaveRequest:
        """The wave that `select` would make; the same errors."""
        inventory = await self._listed(query.source_id)
        request = await asyncio.to_thread(wave_of_query, query, known_vms(inventory), inventory.vms)
        check(request)
        return request

    def sources(self) -> Sequence[Source]:
        """The sources that can be asked. Blocks."""
        return self._sources()

    async def _read(
        self, content: bytes, name: str | None, seen: Wave | None
    ) -> tuple[list[WaveRequest], tuple[str, ...], Sequence[SheetProblem]]:
        if content.lstrip()[:1] == b"{" and not content.startswith(b"{\\rtf"):
            async with self._turn:
                asked = await asyncio.to_thread(from_json, content)
            if seen is not None:
                raise BadRequest("into: JSON has a whole wave", hint=f"replace the draft by PUT /waves/{seen.id}")
            return [asked if name is None else asked.model_copy(update={"name": name})], (), ()
        known, silent = await self._known()
        # Not while the sources are asked: one that is silent would hold up all imports.
        async with self._turn:
            found = await asyncio.to_thread(take_in, content, known)
        if found.problems:
            return [], found.left_out, (*found.problems, *silent)
        return await asyncio.to_thread(_requests, found, name, seen), found.left_out, ()

    def _draft(self, wave_id: UUID) -> Wave:
        wave = self._waves.whole(wave_id)
        if wave.state is not WaveState.DRAFT:
            raise Conflict(f"into: wave {wave.name} is {wave.state}, and no longer a draft")
        return wave

    def _kept(self, requests: list[WaveRequest], seen: Wave | None) -> list[UUID | None]:
        if seen is None:
            return [one.id for one in self._waves.create_all(requests)]
        return [self._waves.replace(seen.id, requests[0], check=with_settings_of(seen), keeps_hooks=True).id]

    async def _listed(self, source_id: UUID) -> Inventory:
        """The VMs of a source. SourceUnreachable, also if it does not answer in time."""
        try:
            async with asyncio.timeout(SOURCE_WITHIN_S):
                return await self._inventory(source_id)
        except TimeoutError as error:
            why = f"the source did not answer within {SOURCE_WITHIN_S:.0f} s"
            raise SourceUnreachable(why, hint="test the source, and try again") from error

    async def _known(self) -> tuple[list[KnownVm], list[SheetProblem]]:
        """The VMs of all sources, asked at once, and the errors of those that did not answer."""
        sources = await asyncio.to_thread(self._sources)

        async def asked(source: Source) -> list[KnownVm] | SheetProblem:
            try:
                return known_vms(await self._listed(source.id))
            except SynvirtError as error:
                detail = f"the VMs of source {source.name} are not known: {error.detail}"
                return SheetProblem(row=0, column="vm", detail=detail[:500], hint="test the source, and import again")

        found: list[KnownVm] = []
        silent: list[SheetProblem] = []
        for one in await asyncio.gather(*map(asked, sources)):
            if isinstance(one, SheetProblem):
                silent.append(one)
            else:
                found += one
        return found, silent


def known_vms(inventory: Inventory) -> list[KnownVm]:
    """Each with the plan for a row without one: warm, if the source can."""
    source = inventory.source
    mode = Mode.WARM if inventory.warm else Mode.COLD

    def plan(vm_id: str) -> MigrationPlan:
        ref = LiveVmRef(kind="live_vm", source_id=source.id, vm_id=vm_id)
        return MigrationPlan(source=PlanSource(Live=source.kind), source_ref=ref, mode=mode)

    return [
        KnownVm(str(source.id), source.name, inventory.instance_id, vm.vm_id, vm.name, plan(vm.vm_id)) for vm in inventory.vms
    ]


def _requests(found: TakenIn, name: str | None, seen: Wave | None) -> list[WaveRequest]:
    by_id = {one.id: one for one in found.members}
    if seen is not None:
        draft = from_json(to_json(seen))
        if len(found.waves) > 1:
            raise BadRequest(
                f"into: the sheet names {len(found.waves)} waves, and a draft is one",
                hint="import it without into, or by parts",
            )
        return [_request(dict(draft), found.members, (*draft.groups, *found.groups))]
    return [
        _request({"name": wave or name or UNNAMED}, tuple(by_id[one] for one in ids), found.groups)
        for wave, ids in found.waves.items()
    ]


def _request(fields: dict[str, Any], members: tuple[MemberRequest, ...], groups: Iterable[Group]) -> WaveRequest:
    """BadRequest, if a wave cannot be like that: with more groups than one has, for example."""
    try:
        return WaveRequest.model_validate(fields | {"members": members, "groups": _groups(members, groups)})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadRequest(f"wave {fields['name'][:100]}: {place(first['loc'])} {worded(first)}") from None


def _groups(members: Iterable[MemberRequest], groups: Iterable[Group]) -> tuple[Group, ...]:
    """The groups of these members. A later group of the same name replaces the rule, and keeps the budget."""
    used = {one.group for one in members}
    kept: dict[str, Group] = {}
    for group in groups:
        if group.name in used:
            before = kept.get(group.name)
            kept[group.name] = group if before is None else before.model_copy(update={"rule": group.rule})
    return tuple(kept.values())


def _checked(requests: Iterable[WaveRequest]) -> list[SheetProblem]:
    """Problems of the whole wave that belong to no single row."""
    problems = []
    for one in requests:
        try:
            check(one)
        except InvalidPlan as error:
            problems.append(SheetProblem(row=0, column="", detail=f"wave {one.name}: {error.detail}"[:500], hint=error.hint))
    return problems


def refused(problems: Sequence[SheetProblem]) -> BadRequest:
    """The error of a sheet with these problems."""
    lines = [
        (f"row {one.row}, {one.column}: " if one.row else "") + one.detail + (f" ({one.hint})" if one.hint else "")
        for one in problems[:PROBLEMS_LISTED]
    ]
    more = [f"and {len(problems) - PROBLEMS_LISTED} more"] if len(problems) > PROBLEMS_LISTED else []
    return BadRequest("; ".join([*lines, *more]), hint="nothing was imported; a dry run lists all that is wrong")
