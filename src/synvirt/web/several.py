"""{base_url}/new/several: several machines of a source at once. Mode and destination are set once for all; name, processors,
memory and waived concerns belong to each machine: their fields end with its id. Each machine gets its own plan and its own
job."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from synvirt.api.problems import incident
from synvirt.api.routes.destinations import shown
from synvirt.errors import BadRequest, SynvirtError
from synvirt.model.job import Migration
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source
from synvirt.web.finding import Found, reference
from synvirt.web.forms import Form, Sent
from synvirt.web.labels import LABELS
from synvirt.web.machine import Setup, planned
from synvirt.web.new import MACHINES_MAX
from synvirt.web.plans import filled, networks_of
from synvirt.web.review import lines, runs_cold, windows_offered

# Little enough for any platform besides its other work.
LOOKED_INTO_AT_ONCE = 4
OWN = ("name", "cpu_count", "memory", "waive")


@dataclass(frozen=True, slots=True)
class Candidate:
    """`found`, or the `error` of the inspection. `mistakes`: in its own fields."""

    vm_id: str
    found: Found | None = None
    error: SynvirtError | None = None
    mistakes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.found.manifest.name if self.found else self.vm_id


@dataclass(frozen=True, slots=True)
class Several:
    """The pages of several machines of one source."""

    setup: Setup

    async def begin(self, source_id: UUID, vm_ids: tuple[str, ...]) -> Response:
        """The form for these VMs of a source."""
        source, candidates = await self._candidates(source_id, vm_ids, "")
        form = Form({"start": ("on",), "mode": ("Cold",), "take": tuple(one.vm_id for one in candidates if one.found)})
        return await self._shown(source, candidates, form, {})

    async def again(self, form: Form) -> Response:
        """The form, as it was filled in."""
        source, candidates = await self._of(form)
        return await self._shown(source, candidates, form, {})

    async def review(self, form: Form) -> Response:
        """The plans of all ticked machines, in words; the form again, if one has mistakes."""
        source, candidates = await self._of(form)
        plans: list[tuple[Found, MigrationPlan]] = []
        judged: list[Candidate] = []
        mistakes: dict[str, str] = {}
        for one in candidates:
            if one.vm_id not in form.many("take"):
                judged.append(one)
                continue
            if (found := one.found) is None:
                judged.append(replace(one, mistakes={"take": "it cannot be inspected now: leave it out, or try again"}))
                continue
            made = filled(_own(form, one.vm_id, found), ref=found.ref, source=found.source, manifest=found.manifest)
            own = {name: words for name, words in made.mistakes.items() if name in OWN}
            mistakes |= {name: words for name, words in made.mistakes.items() if name not in OWN}
            judged.append(Candidate(one.vm_id, found, mistakes=own))
            if made.plan is not None:
                plans.append((found, made.plan))
        if not plans and not mistakes and not any(one.mistakes for one in judged):
            mistakes = {"take": "Choose at least one machine."}
        if mistakes or any(one.mistakes for one in judged):
            return await self._shown(source, judged, form, mistakes)
        return await run_in_threadpool(self._review, source, plans, form)

    def _review(self, source: Source, plans: list[tuple[Found, MigrationPlan]], form: Form) -> Response:
        network, destination = self.setup.networks()[0], next(iter(self.setup.finder.destinations))
        made = [
            (
                plan,
                runs_cold(plan, found.manifest),
                [one for one in lines(plan, found.manifest, network=network, destination=destination) if one.changed],
            )
            for found, plan in plans
        ]
        return self.setup.pages.page("new/several_review.html", source=source, made=made, form=form)

    def submit(self, plans: list[MigrationPlan]) -> Response:
        """Each on its own: a refused one does not stop the others. BadRequest, if there is none."""
        if not plans:
            raise BadRequest("the page sent no plan", hint="start again at New migration")
        begun: list[Migration] = []
        refused: list[tuple[MigrationPlan, SynvirtError]] = []
        for plan in plans:
            try:
                begun.append(self.setup.intake.submit(plan))
            except SynvirtError as error:
                refused.append((plan, error))
            except Exception as error:
                refused.append((plan, incident(error)))
        if refused:
            status = refused[0][1].status
            return self.setup.pages.page("new/several_result.html", status=status, begun=begun, refused=refused)
        return RedirectResponse(f"{self.setup.pages.root}/", status_code=303)

    async def _shown(self, source: Source, candidates: list[Candidate], form: Form, mistakes: Mapping[str, str]) -> Response:
        return await run_in_threadpool(self._page, source, candidates, form, mistakes)

    def _page(self, source: Source, candidates: list[Candidate], form: Form, mistakes: Mapping[str, str]) -> Response:
        mistaken = bool(mistakes) or any(one.mistakes for one in candidates)
        mapped = dict(zip(form.many("network_source"), form.many("network_target"), strict=False))
        cards: dict[str, int] = {}
        for one in candidates:
            for name, count in networks_of(one.found.manifest).items() if one.found else ():
                cards[name] = cards.get(name, 0) + count
        return self.setup.pages.page(
            "new/several.html",
            status=BadRequest.status if mistaken else 200,
            source=source,
            candidates=candidates,
            form=form,
            mistakes=mistakes,
            mistaken=mistaken,
            labels=LABELS | {"take": "Machines"},
            destinations=shown(self.setup.finder.destinations),
            windows=windows_offered(self.setup.intake.store.windows.all()),
            networks_here=self.setup.networks(),
            networks=[(name, count, mapped.get(name, "")) for name, count in cards.items()],
        )

    async def _of(self, form: Form) -> tuple[Source, list[Candidate]]:
        try:
            source_id = UUID(form.text("source_id"))
        except ValueError as error:
            raise BadRequest("the page did not send which source it is about", hint="start again at New migration") from error
        return await self._candidates(source_id, form.many("vm_id"), form.text("destination"))

    async def _candidates(self, source_id: UUID, vm_ids: tuple[str, ...], destination: str) -> tuple[Source, list[Candidate]]:
        if not 0 < len(vm_ids) <= MACHINES_MAX:
            raise BadRequest(f"{len(vm_ids)} machines were chosen", hint=f"choose between 1 and {MACHINES_MAX} at once")
        source = await run_in_threadpool(self.setup.finder.sources.get, source_id)
        turn = asyncio.Semaphore(LOOKED_INTO_AT_ONCE)

        async def looked_into(vm_id: str) -> Candidate:
            try:
                ref = reference({"kind": "live_vm", "source_id": source_id, "vm_id": vm_id})
                async with turn:
                    return Candidate(vm_id, await self.setup.finder.find(ref, destination=destination))
            except SynvirtError as error:
                return Candidate(vm_id, error=error)

        return source, list(await asyncio.gather(*map(looked_into, dict.fromkeys(vm_ids))))


def _own(form: Form, vm_id: str, found: Found) -> Form:
    """The form of this machine: the common fields and its own."""
    own = {name: form.many(f"{name}:{vm_id}") for name in OWN}
    return Form({**form.fields, **own, "disk": tuple(disk.key for disk in found.manifest.disks)})


def several_router(several: Several) -> APIRouter:
    """The pages for several machines at once."""
    router = several.setup.pages.router()

    @router.get("/new/several")
    async def begin(source_id: UUID, vm_id: Annotated[list[str] | None, Query()] = None) -> Response:
        return await several.begin(source_id, tuple(vm_id or ()))

    @router.post("/new/several/review")
    async def review(form: Sent) -> Response:
        return await several.review(form)

    @router.post("/new/several/change")
    async def change(form: Sent) -> Response:
        return await several.again(form)

    @router.post("/new/several/submit")
    async def submit(form: Sent) -> Response:
        plans = [planned(Form({"plan": (text,)})) for text in form.many("plan")]
        return await run_in_threadpool(several.submit, plans)

    return router
