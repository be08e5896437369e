"""{base_url}/backups/points: restore points: verified, restored, removed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from synvirt.backups.model import RestorePoint, RestorePointChange, RestoreRequest
from synvirt.backups.service import Backups
from synvirt.errors import BadRequest, SynvirtError
from synvirt.web.backups import ON_A_PAGE, After, ask, found, number
from synvirt.web.fields import Field, fields, judged, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages
from synvirt.web.words import moment


@dataclass(frozen=True, slots=True)
class Target:
    """What a point can become. `before`: what is said before it is begun. `labels`: of the request's fields that it has a use
    for; each is the form's own, so that no target gets what was typed for another."""

    name: str
    words: str
    meaning: str
    before: str
    labels: Mapping[str, str]

    @property
    def fields(self) -> list[Field]:
        known = {one.key: one for one in fields(RestoreRequest, f"{self.name}.")}
        return [replace(known[key], label=label) for key, label in self.labels.items()]


TARGETS = (
    Target(
        "export",
        "Files",
        "The disks, and the guest's definition, as files in a new folder of this host.",
        "Its disks are written into a new folder. No guest is touched.",
        {
            "name": "Name of the folder (without one: the run's id)",
            "path": "Where it is made (without: in the service's own exports)",
            "format": "Format of the disks",
        },
    ),
    Target(
        "new_domain",
        "Another guest",
        "A guest beside the others, with addresses of its own.",
        "A new guest is defined here with these disks. The guest that was backed up is not touched.",
        {"name": "Its name (without one: as it was)", "start": "Start it when it is restored"},
    ),
    Target(
        "in_place",
        "The guest itself, as it was then",
        "The guest gets its disks back as they were. It has to be shut off.",
        "What its disks hold now is replaced by what they held then: what was written since is lost.",
        {"start": "Start it when it is restored"},
    ),
)


class PointPages:
    def __init__(self, pages: Pages, backups: Backups) -> None:
        self._pages, self._backups = pages, backups

    def points(self, cursor: str | None) -> Response:
        points, following = self._backups.points.page(limit=ON_A_PAGE, cursor=number(cursor))
        return self._pages.page("backups/points.html", points=points, following=following, cursor=cursor)

    def point(self, point_id: UUID) -> Response:
        point = self._backups.points.get(point_id)
        repository = found(self._backups.repositories.get, point.repository_id)
        return self._pages.page("backups/point.html", point=point, repository=repository.name if repository else "gone")

    def restore_form(self, point_id: UUID, form: Form | None = None, error: SynvirtError | None = None) -> Response:
        point = self._backups.points.get(point_id)
        return self._pages.page(
            "backups/restore.html",
            status=error.status if error else 200,
            error=error,
            point=point,
            targets=[(one, typed(one.fields, form, error) if form else one.fields) for one in TARGETS],
            chosen=form.text("target") if form else TARGETS[0].name,
            disks=form.many("disks") if form else [disk.target for disk in point.disks],
        )

    def restore(self, point_id: UUID, form: Form) -> Response:
        """Asked about first, and begun with the answer."""
        point = self._backups.points.get(point_id)
        target = next((one for one in TARGETS if one.name == form.text("target")), TARGETS[0])
        asked = values(target.fields, form) | {"target": target.name}
        chosen = form.many("disks")
        if chosen != tuple(disk.target for disk in point.disks):
            asked["disks"] = chosen
        try:
            if not chosen:
                raise BadRequest("no disk is chosen")
            request = judged(RestoreRequest, asked)
            if form.text("sure"):
                return self._see(f"/backups/runs/{self._backups.restore(point_id, request).id}")
        except SynvirtError as error:
            return self.restore_form(point_id, form, error)
        return self._ask_to_restore(point, request, target, form)

    def _ask_to_restore(self, point: RestorePoint, request: RestoreRequest, target: Target, form: Form) -> Response:
        disks = ", ".join(request.disks) if request.disks else "all its disks"
        sent = [(name, text) for name, texts in form.fields.items() for text in texts]
        return ask(
            self._pages,
            "Restore it?",
            f"{point.vm_name}, as it was at {moment(point.created_at)}: {disks}",
            target.before,
            action=f"/backups/points/{point.id}/restore",
            back=f"/backups/points/{point.id}/restore",
            yes="restore it",
            danger=target.name == "in_place",
            hidden=[*sent, ("sure", "yes")],
        )

    def ask(self, point_id: UUID, question: str, *meaning: str, asked: str, yes: str, danger: bool = False) -> Response:
        point = self._backups.points.get(point_id)
        here = f"/backups/points/{point_id}"
        subject = f"{point.vm_name}, {moment(point.created_at)}"
        return ask(self._pages, question, subject, *meaning, action=f"{here}/{asked}", back=here, yes=yes, danger=danger)

    def verify(self, point_id: UUID) -> Response:
        return self._see(f"/backups/runs/{self._backups.verify(point_id).id}")

    def boot_test(self, point_id: UUID) -> Response:
        return self._see(f"/backups/runs/{self._backups.boot_test(point_id).id}")

    def protect(self, point_id: UUID, *, protected: bool) -> Response:
        self._backups.protect(point_id, RestorePointChange(protected=protected))
        return self._see(f"/backups/points/{point_id}")

    def remove(self, point_id: UUID) -> Response:
        self._backups.remove_point(point_id)
        return self._see("/backups/points")

    def _see(self, path: str) -> Response:
        return RedirectResponse(f"{self._pages.root}{path}", status_code=303)


def points_router(pages: Pages, backups: Backups) -> APIRouter:
    router = pages.router()
    made = PointPages(pages, backups)
    _shown(router, made)
    _asked(router, made)
    return router


def _shown(router: APIRouter, made: PointPages) -> None:
    @router.get("/backups/points")
    def points(cursor: After = None) -> Response:
        return made.points(cursor)

    @router.get("/backups/points/{point_id}")
    def point(point_id: UUID) -> Response:
        return made.point(point_id)

    @router.get("/backups/points/{point_id}/restore")
    def restore_form(point_id: UUID) -> Response:
        return made.restore_form(point_id)

    @router.get("/backups/points/{point_id}/verify")
    def verify_asked(point_id: UUID) -> Response:
        meaning = "All of it is read and held to what was backed up. That takes as long as reading its disks once."
        return made.ask(point_id, "Verify this restore point?", meaning, asked="verify", yes="verify it")

    @router.get("/backups/points/{point_id}/boot-test")
    def boot_test_asked(point_id: UUID) -> Response:
        meaning = "Its guest is started beside the others, cut off from all networks, and watched. Nothing of it stays."
        return made.ask(point_id, "See whether it boots?", meaning, asked="boot-test", yes="start it")

    @router.get("/backups/points/{point_id}/remove")
    def remove_asked(point_id: UUID) -> Response:
        meaning = "The guest cannot be brought back to this moment any more. Other points are not touched."
        return made.ask(point_id, "Remove this restore point?", meaning, asked="remove", yes="remove it", danger=True)


def _asked(router: APIRouter, made: PointPages) -> None:
    @router.post("/backups/points/{point_id}/restore")
    async def restore(point_id: UUID, sent: Sent) -> Response:
        return await run_in_threadpool(made.restore, point_id, sent)

    @router.post("/backups/points/{point_id}/verify")
    def verify(point_id: UUID) -> Response:
        return made.verify(point_id)

    @router.post("/backups/points/{point_id}/boot-test")
    def boot_test(point_id: UUID) -> Response:
        return made.boot_test(point_id)

    @router.post("/backups/points/{point_id}/protect")
    def protect(point_id: UUID) -> Response:
        return made.protect(point_id, protected=True)

    @router.post("/backups/points/{point_id}/let-go")
    def let_go(point_id: UUID) -> Response:
        return made.protect(point_id, protected=False)

    @router.post("/backups/points/{point_id}/remove")
    def remove(point_id: UUID) -> Response:
        return made.remove(point_id)
