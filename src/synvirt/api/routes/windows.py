"""{base_url}/api/v1/migrator/windows: the windows that plans of single jobs name as `warm.window_id`. Waves have their own."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from synvirt.api.document import problem_described
from synvirt.api.paging import PAGE_LIMIT, LastName, Limit, Sought, named_page
from synvirt.api.received import documented, json_body
from synvirt.api.routing import Routes
from synvirt.api.tags import IfMatch, Tags
from synvirt.errors import BadRequest, InvalidPlan
from synvirt.migrations.planning.openings import shown
from synvirt.migrations.planning.windows import check
from synvirt.model.values import now
from synvirt.model.windows import Window, WindowPage, WindowShown
from synvirt.store.windows import WindowRows

_BODY = Annotated[Window, Depends(json_body(Window))]


def windows_router(rows: WindowRows) -> APIRouter:
    """The routes under /windows. All of them block, and run in threads."""
    router = Routes(prefix="/windows", tags=["windows"])

    @router.post(
        "",
        status_code=201,
        response_model=WindowShown,
        openapi_extra=documented(Window),
        responses={409: problem_described("E_MIG_CONFLICT: there is a window of that id already")},
    )
    def add_window(window: _BODY, request: Request, response: Response) -> WindowShown:
        """Make a window. Plans name it by its id: `warm.window_id`."""
        refuse_impossible(window)
        rows.add(window)
        response.headers["Location"] = f"{request.url.path}/{window.id}"
        return shown(window, now())

    @router.get("", response_model=WindowPage)
    def list_windows(limit: Limit = PAGE_LIMIT, cursor: LastName = None) -> WindowPage:
        """List the windows by id, each with its present opening, or its next one."""
        found, following = named_page(rows.all(), lambda one: one.id, limit=limit, cursor=cursor, removable=True)
        return WindowPage(items=tuple(shown(one, now()) for one in found), next_cursor=following)

    @router.get("/{window_id}", response_model=WindowShown)
    def load_window(window_id: Sought, tags: Tags) -> WindowShown:
        """Load one window."""
        return shown(tags(rows.get(window_id)), now())

    @router.put("/{window_id}", response_model=WindowShown, openapi_extra=documented(Window))
    def change_window(window_id: Sought, window: _BODY, tags: IfMatch) -> WindowShown:
        """Change a window; its id stays. Jobs that name it go by the new times at once. A cut-over that is then outside of it
        is rolled back."""
        if window.id != window_id:
            raise BadRequest(f"id: is {window.id}, and the window is {window_id}", hint="a window keeps its id")
        refuse_impossible(window)

        def changed(before: Window) -> Window:
            tags.check(before)
            return window

        return shown(rows.change(window_id, changed), now())

    @router.delete(
        "/{window_id}",
        status_code=204,
        responses={409: problem_described("E_MIG_CONFLICT: an unended job cuts over in it")},
    )
    def remove_window(window_id: Sought, tags: IfMatch) -> None:
        """Remove a window. 409 while an unended job names it."""
        rows.remove(window_id, tags.check)

    return router


def refuse_impossible(window: Window) -> None:
    """BadRequest, for times or a rule that no calendar has."""
    try:
        check(window)
    except InvalidPlan as error:
        where = "rrule" if window.rrule is not None else "start"
        raise BadRequest(f"{where}: {error.detail}", hint=error.hint) from None
