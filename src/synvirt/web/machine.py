"""{base_url}/new/machine: one machine is inspected and set up; its plan is reviewed; its job begins.

Each step is a form with all of the data: nothing is stored here between two steps. `submit` receives exactly what `review`
shows.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import SecretStr, ValidationError
from starlette.responses import RedirectResponse, Response

from synvirt.api.routes.destinations import shown
from synvirt.errors import BadRequest, SynvirtError, UnsupportedFormat
from synvirt.migrations.intake import Intake
from synvirt.model.plan import MigrationPlan, RemoteUrlRef, SourceRef
from synvirt.offline.elsewhere import CREDENTIALS
from synvirt.web.finding import Finder, Found, reference
from synvirt.web.forms import Form, Sent
from synvirt.web.labels import LABELS
from synvirt.web.new import Beginning
from synvirt.web.pages import Pages
from synvirt.web.plans import critical, filled, networks_of, written
from synvirt.web.review import expected, expected_way, lines, runs_cold, windows_offered

SECRETS = sorted(frozenset().union(*CREDENTIALS.values()))
OPTIONS = ("fingerprint_sha256", "region", "endpoint")


@dataclass(frozen=True, slots=True)
class Setup:
    """`networks`: what a card can be connected to here, the default first."""

    pages: Pages
    finder: Finder
    intake: Intake
    networks: Callable[[], list[str]]

    async def machine(self, ref: SourceRef, sealed: str = "") -> Response:
        """Inspects it for the first time. If a file has several machines, it asks for one."""
        try:
            found = await self.finder.find(ref, sealed)
        except UnsupportedFormat as error:
            if not error.holds:
                raise
            return self.pages.page("new/which.html", ref_json=ref.model_dump_json(), sealed=sealed, names=error.holds)
        return await self.shown(found, _untouched(found))

    async def shown(
        self,
        found: Found,
        form: Form,
        *,
        mistakes: Mapping[str, str] | None = None,
        failure: SynvirtError | None = None,
    ) -> Response:
        """The form of a found machine. `mistakes`: sentences by the name of their field."""
        return await run_in_threadpool(self._shown, found, form, mistakes or {}, failure)

    def _shown(self, found: Found, form: Form, mistakes: Mapping[str, str], failure: SynvirtError | None) -> Response:
        networks = dict(zip(form.many("network_source"), form.many("network_target"), strict=False))
        return self.pages.page(
            "new/machine.html",
            status=failure.status if failure else BadRequest.status if mistakes else 200,
            found=found,
            form=form,
            mistakes=mistakes,
            labels=LABELS,
            failure=failure,
            destinations=shown(self.finder.destinations),
            windows=windows_offered(self.intake.store.windows.all()),
            networks_here=self.networks(),
            networks=[(name, count, networks.get(name, "")) for name, count in networks_of(found.manifest).items()],
            concerns=sorted(found.manifest.concerns, key=lambda one: _WEIGHT[one.category]),
            **_carried(found),
        )

    async def review(self, form: Form) -> Response:
        """The form's plan, in words; the form again, if it has mistakes."""
        found = await self._found_again(form)
        made = filled(form, ref=found.ref, source=found.source, manifest=found.manifest)
        if made.plan is None:
            return await self.shown(found, form, mistakes=made.mistakes)
        return await run_in_threadpool(self._review, found, made.plan)

    def _review(self, found: Found, plan: MigrationPlan) -> Response:
        """The review, with all that can be checked in advance: the service judges the plan as it will when it is submitted."""
        default = self.networks()[0]
        foreseen = self.intake.dry_run(self._whole(plan, found.sealed))
        return self.pages.page(
            "new/review.html",
            found=found,
            plan=plan,
            name=plan.name or found.manifest.name,
            lines=lines(plan, found.manifest, network=default, destination=next(iter(self.finder.destinations))),
            stations=expected_way(plan, found.manifest),
            runs_cold=runs_cold(plan, found.manifest),
            waived=[one for one in foreseen.concerns if one.id in plan.waive_concerns],
            foreseen=foreseen,
            ways={way.disk_key: way for way in foreseen.ways},
            expected=list(expected(foreseen.forecast, foreseen.cut_over)),
            plan_json=plan.model_dump_json(exclude_defaults=True),
            envelope=json.dumps({"plan": plan.model_dump(mode="json", exclude_defaults=True)}, indent=2),
            sealed=found.sealed,
        )

    async def change(self, form: Form) -> Response:
        """The form of a plan that was reviewed."""
        plan = planned(form)
        found = await self.finder.find(plan.source_ref, form.text("sealed"), destination=plan.target.destination or "")
        return await self.shown(found, written(plan, found.manifest))

    async def again(self, job_id: UUID) -> Response:
        """The plan of a job that ended badly, to be corrected and started again."""
        plan = (await run_in_threadpool(self.intake.store.get, job_id)).plan
        found = await self.finder.find(plan.source_ref, destination=plan.target.destination or "")
        return await self.shown(found, written(plan, found.manifest))

    async def submit(self, form: Form) -> Response:
        """Begins the job, and leads to its page; if the service refuses it, the form comes back with the reason."""
        plan, sealed = planned(form), form.text("sealed")
        try:
            job = await run_in_threadpool(self.intake.submit, self._whole(plan, sealed))
        except SynvirtError as error:
            # If the machine cannot be found either, that is the page.
            found = await self.finder.find(plan.source_ref, sealed, destination=plan.target.destination or "")
            mistakes = {"waive": error.detail} if critical(plan, found.manifest) else {}
            return await self.shown(found, written(plan, found.manifest), mistakes=mistakes, failure=error)
        return RedirectResponse(f"{self.pages.root}/migrations/{job.id}", status_code=303)

    def _whole(self, plan: MigrationPlan, sealed: str) -> MigrationPlan:
        if not isinstance(plan.source_ref, RemoteUrlRef):
            return plan
        return plan.model_copy(update={"source_ref": self.finder.opened(plan.source_ref, sealed)})

    async def _found_again(self, form: Form) -> Found:
        return await self.finder.find(_ref(form), form.text("sealed"), destination=form.text("destination"))


_WEIGHT = {"Critical": 0, "Warning": 1, "Information": 2}


def machine_router(setup: Setup, beginning: Beginning) -> APIRouter:
    """The pages that set a machine up and begin its job."""
    router = setup.pages.router()

    @router.get("/new/machine")
    async def machine(request: Request) -> Response:
        return await setup.machine(reference({name: value for name, value in request.query_params.items() if value}))

    @router.post("/new/again/{job_id}")
    async def again(job_id: UUID) -> Response:
        """Not a GET, as it asks the source."""
        return await setup.again(job_id)

    @router.post("/new/machine")
    async def chosen(form: Sent) -> Response:
        """One of several machines in a file."""
        ref = _ref(form)
        return await setup.machine(reference(ref.model_dump() | {"vm": form.text("vm")}), form.text("sealed"))

    @router.post("/new/elsewhere")
    async def elsewhere(form: Sent) -> Response:
        try:
            return await setup.machine(*setup.finder.closed(_elsewhere(form)))
        except SynvirtError as error:
            return await run_in_threadpool(beginning.page, form, error)

    @router.post("/new/review")
    async def review(form: Sent) -> Response:
        return await setup.review(form)

    @router.post("/new/change")
    async def change(form: Sent) -> Response:
        return await setup.change(form)

    @router.post("/new/submit")
    async def submit(form: Sent) -> Response:
        return await setup.submit(form)

    return router


def planned(form: Form) -> MigrationPlan:
    """The plan that `review` showed. BadRequest."""
    try:
        return MigrationPlan.model_validate_json(form.text("plan"))
    except ValidationError as error:
        raise BadRequest("the page did not send the plan that it showed", hint="start again at New migration") from error


def _ref(form: Form) -> SourceRef:
    try:
        return reference(json.loads(form.text("ref")))
    except ValueError as error:
        raise BadRequest("the page did not send which machine it is about", hint="start again at New migration") from error


def _untouched(found: Found) -> Form:
    """All disks, started here at the end, cold: the plan if nothing is changed."""
    disks = tuple(disk.key for disk in found.manifest.disks)
    return Form({"start": ("on",), "mode": ("Cold",), "disk": disks})


def _carried(found: Found) -> dict[str, Any]:
    return {"ref_json": found.ref.model_dump_json(), "sealed": found.sealed}


def _elsewhere(form: Form) -> RemoteUrlRef:
    """BadRequest names the field."""
    try:
        return RemoteUrlRef.model_validate(
            {
                "kind": "remote_url",
                "url": form.text("url"),
                "credentials": {name: SecretStr(value) for name in SECRETS if (value := form.text(name))},
                "options": {name: value for name in OPTIONS if (value := form.text(name))},
            }
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][-1])
        raise BadRequest(
            f"{field}: is not of the form it must have",
            hint="https://files.example/web01.ova, s3://bucket/key, smb://host/share/file",
        ) from error
