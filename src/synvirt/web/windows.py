"""{base_url}/windows: when single jobs cut over: windows seen, made, changed, removed. Waves have their own."""

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.paging import LastName, Sought, named_page
from synvirt.api.routes.windows import refuse_impossible
from synvirt.errors import SynvirtError
from synvirt.migrations.planning.openings import shown
from synvirt.model.values import now
from synvirt.model.windows import LockOut, Window
from synvirt.store.windows import WindowRows
from synvirt.web.fields import Field, Mistaken, fields, judged, mark_of, refuse_overtaken, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages

ON_A_PAGE = 100
LOCKOUT_FORM = "each line has two local times, the later one last: 2026-12-24T00:00:00 2026-12-27T00:00:00"


class WindowPages:
    """The pages of windows; `windows_router` has their paths."""

    def __init__(self, pages: Pages, rows: WindowRows) -> None:
        self._pages, self._rows = pages, rows

    def listed(self, cursor: LastName = None) -> Response:
        """The windows by id, each with its present opening, or its next one."""
        items, following = named_page(self._rows.all(), lambda one: one.id, limit=ON_A_PAGE, cursor=cursor, removable=True)
        return self._pages.page(
            "windows/list.html", windows=[shown(one, now()) for one in items], following=following, cursor=cursor
        )

    def empty_form(self) -> Response:
        return self._form(None, _fields(None))

    def add(self, form: Sent) -> Response:
        """Makes a window; a form with mistakes comes back with them."""
        known = _fields(None)
        try:
            window = _window(known, form)
            self._rows.add(window)
        except SynvirtError as error:
            return self._form(None, typed(known, form, error), error)
        return self._pages.see("/windows")

    def change_form(self, window_id: Sought) -> Response:
        """The form that changes a window."""
        window = self._rows.get(window_id)
        return self._form(window, _fields(window))

    def change(self, window_id: Sought, form: Sent) -> Response:
        """Changes a window, and keeps its id; a form with mistakes, or of a window that was changed since, comes back."""
        before = self._rows.get(window_id)
        known = _fields(before)
        try:
            refuse_overtaken(known, form)
            after = _window(known, form, id=window_id)

            def changed(found: Window) -> Window:
                refuse_overtaken(_fields(found), form)
                return after

            self._rows.change(window_id, changed)
        except SynvirtError as error:
            return self._form(before, typed(known, form, error), error)
        return self._pages.see("/windows")

    def remove_asked(self, window_id: Sought) -> Response:
        """Asks whether to remove a window."""
        return self._pages.ask(
            "Remove this window?",
            self._rows.get(window_id).name,
            "New plans cannot name it any more. Jobs that have ended, and waves, do not need it.",
            action=f"/windows/{window_id}/remove",
            back="/windows",
            yes="remove it",
            here="/windows",
            danger=True,
        )

    def remove(self, window_id: Sought) -> Response:
        """Removes a window."""
        self._rows.remove(window_id)
        return self._pages.see("/windows")

    def _form(self, window: Window | None, filled: list[Field], error: SynvirtError | None = None) -> Response:
        return self._pages.page(
            "windows/form.html",
            status=error.status if error else 200,
            window=window,
            fields=filled,
            mark=mark_of(_fields(window)),
            error=error,
        )


def _fields(window: Window | None) -> list[Field]:
    """Of a new window, or of one that is changed, whose id stays."""
    if window is None:
        return fields(Window)
    found = window.model_dump(mode="json")
    lockouts = [f"{one['start']} {one['end']}" for one in found["lockouts"]]
    return [one for one in fields(Window, values=found | {"lockouts": lockouts}) if one.key != "id"]


def _window(known: list[Field], form: Form, **fixed: str) -> Window:
    """Mistaken, BadRequest."""
    wanted = values(known, form)
    window = judged(Window, wanted | {"lockouts": _lockouts(wanted.get("lockouts", []))} | fixed)
    refuse_impossible(window)
    return window


def _lockouts(lines: list[str]) -> list[LockOut]:
    """From lines with two times each. Mistaken."""
    found = []
    for line in lines:
        try:
            found.append(judged(LockOut, dict(zip(("start", "end"), line.split(), strict=True))))
        except (Mistaken, ValueError) as error:
            wrong = "; ".join(error.mistakes.values()) if isinstance(error, Mistaken) else "needs two times"
            raise Mistaken({"lockouts": f"{line}: {wrong}; {LOCKOUT_FORM}"}) from None
    return found


def windows_router(pages: Pages, rows: WindowRows) -> APIRouter:
    """The pages of windows."""
    made = WindowPages(pages, rows)
    return pages.router(
        {
            "GET /windows": made.listed,
            "GET /windows/new": made.empty_form,
            "POST /windows/new": made.add,
            "GET /windows/{window_id}/change": made.change_form,
            "POST /windows/{window_id}/change": made.change,
            "GET /windows/{window_id}/remove": made.remove_asked,
            "POST /windows/{window_id}/remove": made.remove,
        }
    )
