"""When a plan with a window would cut over."""

from datetime import timedelta

from synvirt.errors import InvalidPlan
from synvirt.migrations.planning.naming import refuse_unknown
from synvirt.migrations.planning.openings import opening
from synvirt.migrations.rooms import Rooms
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import Model, Time, now
from synvirt.model.windows import Window


class CutOverTime(Model):
    """When a plan with `warm.window_id` would cut over: within the first opening after its first copy that is as long as its
    outage may be, as far as both are forecast. Null times: none is, up to the horizon of windows."""

    window_id: str
    not_before: Time | None
    not_after: Time | None


def check_window(rooms: Rooms, plan: MigrationPlan) -> Window | None:
    """The window of the plan; None, if it names none. InvalidPlan, if there is no such window, or it does not open again."""
    if plan.warm.window_id is None:
        return None
    windows = {one.id: one for one in rooms.store.windows.all()}
    refuse_unknown(plan.warm.window_id, windows, "window")
    window = windows[plan.warm.window_id]
    if opening(window, now()) is None:
        raise InvalidPlan(
            f"window {window.id} does not open within three years from now or from its start",
            hint="change it, or name another one",
        )
    return window


def cut_over(rooms: Rooms, plan: MigrationPlan, *, copy_s: float, outage_s: float) -> CutOverTime | None:
    """When the plan would cut over; None, if it names no window that there is. `copy_s`, `outage_s`: how long its first copy
    and its outage may take."""
    try:
        window = check_window(rooms, plan)
    except InvalidPlan:
        return None
    if window is None:
        return None
    begins = max(now(), plan.schedule.start_at or now())
    copied = begins + timedelta(seconds=copy_s)
    span = opening(window, copied, needed_s=outage_s)
    if span is None:
        return CutOverTime(window_id=window.id, not_before=None, not_after=None)
    return CutOverTime(window_id=window.id, not_before=max(span.start, copied), not_after=span.end)
