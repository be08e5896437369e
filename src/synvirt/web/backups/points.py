"""{base_url}/backups/points: restore points: verified, restored, removed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.backups.model import RestorePoint, RestorePointChange, RestoreRequest
from synvirt.backups.service import Backups
from synvirt.errors import BadRequest, SynvirtError
from synvirt.web.backups.jobs import ON_A_PAGE, found
from synvirt.web.fields import Field, fields, judged, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages
from synvirt.web.words import moment


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of restore. `before`: the text before it begins. `labels`: of the request's fields that it uses; the form has them
    for each kind separately, so that none gets input for another."""

    name: str
    words: str
    meaning: str
    before: str
    labels: Mapping[str, str]

    @property
    def fields(self) -> list[Field]:
        """The fields of the form for this kind of restore."""
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
        {
            "name": "Its name (without one: as it was)",
            "start": "Start it when it is restored",
            "instant": "Start it at once, and copy it while it runs",
        },
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
    """The pages of restore points; `points_router` has their paths."""

    def __init__(self, pages: Pages, backups: Backups) -> None:
        self._pages, self._backups = pages, backups

    def points(self, cursor: Cursor = None) -> Response:
        """The restore points, newest first."""
        points, following = self._backups.points.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        return self._pages.page("backups/points.html", points=points, following=following, cursor=cursor)

    def point(self, point_id: UUID) -> Response:
        """One restore point."""
        point = self._backups.points.get(point_id)
        repository = found(self._backups.repositories.get, point.repository_id)
        return self._pages.page("backups/point.html", point=point, repository=repository.name if repository else "gone")

    def empty_form(self, point_id: UUID) -> Response:
        return self._form(point_id)

    def _form(self, point_id: UUID, form: Form | None = None, error: SynvirtError | None = None) -> Response:
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

    def restore(self, point_id: UUID, form: Sent) -> Response:
        """Asks first, and begins after the answer."""
        point = self._backups.points.get(point_id)
        target = next((one for one in TARGETS if one.name == form.text("target")), TARGETS[0])
        asked = values(target.fields, form) | {"target": target.name}
        if asked.get("instant"):
            asked["start"] = True
        chosen = form.many("disks")
        if chosen != tuple(disk.target for disk in point.disks):
            asked["disks"] = chosen
        try:
            if not chosen:
                raise BadRequest("no disk is chosen")
            request = judged(RestoreRequest, asked)
            if form.text("sure"):
                return self._pages.see(f"/backups/runs/{self._backups.restore(point_id, request).id}")
        except SynvirtError as error:
            return self._form(point_id, form, error)
        return self._ask_to_restore(point, request, target, form)

    def _ask_to_restore(self, point: RestorePoint, request: RestoreRequest, target: Target, form: Form) -> Response:
        disks = ", ".join(request.disks) if request.disks else "all its disks"
        sent = [(name, text) for name, texts in form.fields.items() for text in texts]
        return self._pages.ask(
            "Restore it?",
            f"{point.vm_name}, as it was at {moment(point.created_at)}: {disks}",
            target.before,
            action=f"/backups/points/{point.id}/restore",
            back=f"/backups/points/{point.id}/restore",
            yes="restore it",
            here="/backups",
            danger=target.name == "in_place",
            hidden=[*sent, ("sure", "yes")],
        )

    def verify_asked(self, point_id: UUID) -> Response:
        """Asks whether to verify a restore point."""
        meaning = "All of it is read and compared with what was backed up. That takes as long as reading its disks once."
        return self._ask(point_id, "Verify this restore point?", meaning, asked="verify", yes="verify it")

    def verify(self, point_id: UUID) -> Response:
        return self._pages.see(f"/backups/runs/{self._backups.verify(point_id).id}")

    def boot_test_asked(self, point_id: UUID) -> Response:
        """Asks whether to boot a restore point."""
        meaning = "Its guest is started beside the others, cut off from all networks, and watched. Nothing of it stays."
        return self._ask(point_id, "See whether it boots?", meaning, asked="boot-test", yes="start it")

    def boot_test(self, point_id: UUID) -> Response:
        return self._pages.see(f"/backups/runs/{self._backups.boot_test(point_id).id}")

    def protect(self, point_id: UUID) -> Response:
        """Protects a restore point."""
        self._backups.protect(point_id, RestorePointChange(protected=True))
        return self._pages.see(f"/backups/points/{point_id}")

    def let_go(self, point_id: UUID) -> Response:
        """Takes the protection off a restore point."""
        self._backups.protect(point_id, RestorePointChange(protected=False))
        return self._pages.see(f"/backups/points/{point_id}")

    def remove_asked(self, point_id: UUID) -> Response:
        """Asks whether to remove a restore point."""
        meaning = "The guest can no longer be restored to this moment. Other points are not touched."
        return self._ask(point_id, "Remove this restore point?", meaning, asked="remove", yes="remove it", danger=True)

    def remove(self, point_id: UUID) -> Response:
        """Removes a restore point."""
        self._backups.remove_point(point_id)
        return self._pages.see("/backups/points")

    def _ask(self, point_id: UUID, question: str, meaning: str, *, asked: str, yes: str, danger: bool = False) -> Response:
        point, here = self._backups.points.get(point_id), f"/backups/points/{point_id}"
        subject = f"{point.vm_name}, {moment(point.created_at)}"
        return self._pages.ask(
            question, subject, meaning, action=f"{here}/{asked}", back=here, yes=yes, here="/backups", danger=danger
        )


def points_router(pages: Pages, backups: Backups) -> APIRouter:
    """The pages of restore points."""
    made = PointPages(pages, backups)
    here = "/backups/points/{point_id}"
    return pages.router(
        {
            "GET /backups/points": made.points,
            f"GET {here}": made.point,
            f"GET {here}/restore": made.empty_form,
            f"POST {here}/restore": made.restore,
            f"GET {here}/verify": made.verify_asked,
            f"POST {here}/verify": made.verify,
            f"GET {here}/boot-test": made.boot_test_asked,
            f"POST {here}/boot-test": made.boot_test,
            f"POST {here}/protect": made.protect,
            f"POST {here}/let-go": made.let_go,
            f"GET {here}/remove": made.remove_asked,
            f"POST {here}/remove": made.remove,
        }
    )
