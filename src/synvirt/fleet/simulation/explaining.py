"""Why a run went as it did: what each member waited for, and what holds back the wave's end."""

from datetime import datetime

from synvirt.fleet.simulation.nouns import TICK_S, MemberForecast
from synvirt.fleet.simulation.running import BOUNDS, Run
from synvirt.sizes import duration


def forecast_of(run: Run, name: str) -> MemberForecast:
    """When a member begins, is ready and cuts over in this run, and why then."""
    load = run.setting.loads[name]
    return MemberForecast(
        id=name,
        source_host=load.source_host,
        destination=load.destination,
        begins_at=run.begins.get(name),
        ready_at=run.ready.get(name),
        planned_at=run.cuts.get(name),
        healthy_at=run.healthy.get(name),
        reason=_reason(run, name),
    )


def _reason(run: Run, name: str) -> str:
    if name in run.healthy:
        begun, ready = run.begins.get(name), run.ready.get(name)
        before_s = (begun - run.setting.start).total_seconds() if begun is not None else 0.0
        after_s = (run.cuts[name] - ready).total_seconds() if ready is not None and name in run.cuts else 0.0
        if max(before_s, after_s) < 2 * TICK_S:
            return "It goes on without waiting."
        late = run.why_cut_late if after_s >= before_s else run.why_begun_late
        return late.get(name) or "It goes on without waiting."
    if name in run.lost:
        return run.lost[name]
    # Asked at the last moment at which something could have begun.
    return run.scheduler.why(name, run.now) or "It has ended."


def bottleneck(run: Run) -> tuple[str, dict[str, float]]:
    """The cause that delays the wave's end, as a sentence; and the seconds of each cause. Counted are the member that ends
    last, the one that it waited for, and so on."""
    seconds: dict[str, float] = {}
    name = max(run.healthy, key=run.healthy.__getitem__, default=None)
    if name is None:
        return "nothing moves", {}
    last, seen = name, {name}
    while name is not None:
        following = _slowest_needed(run, name, seen)
        _account(run, name, run.healthy.get(following) if following else None, seconds)
        name = following
        seen.add(name or "")
    cause = max(seconds, key=seconds.__getitem__, default="nothing")
    return f"{cause}: {duration(seconds.get(cause, 0.0))} of the way of {last}, which ends last.", seconds


def _slowest_needed(run: Run, name: str, seen: set[str]) -> str | None:
    """The member that `name` waited for last, after its own copy was ready; None, where it waited for none."""
    needs = [one for one in run.setting.order.needs(name) if one in run.healthy and one not in seen]
    slowest = max(needs, key=run.healthy.__getitem__, default=None)
    if slowest is None or name not in run.ready or run.healthy[slowest] <= run.ready[name]:
        return None
    return slowest


def _account(run: Run, name: str, from_: datetime | None, seconds: dict[str, float]) -> None:
    load, start = run.setting.loads[name], run.setting.start
    begun, ready, cut = run.begins.get(name), run.ready.get(name), run.cuts.get(name)

    def add(cause: str, length_s: float) -> None:
        if length_s > 0:
            seconds[cause] = seconds.get(cause, 0.0) + length_s

    if ready is not None and cut is not None:
        since = max(ready, from_ or ready)
        closed = run.scheduler.open_span_of(name, since) is None
        add(
            _window_of(run, name) if closed else _cause(run, run.why_cut_late.get(name, ""), name),
            (cut - since).total_seconds(),
        )
    copying = run.bound_seconds(name)
    is_cold = name in run.cold
    if cut is not None and name in run.healthy:
        add("cut-overs themselves", (run.healthy[name] - cut).total_seconds() - (sum(copying) if is_cold else 0.0))
    if from_ is not None and not is_cold:
        return
    if from_ is None and begun is not None:
        add(_cause(run, run.why_begun_late.get(name, ""), name), (begun - start).total_seconds())
    places = ("", f" {load.source_host}", f" {load.destination}", "", "")
    for what, place, spent in zip(BOUNDS, places, copying, strict=True):
        add(f"{what}{place}", spent)


def _cause(run: Run, why: str, name: str) -> str:
    """The cause in a scheduler's sentence, in a few words."""
    load = run.setting.loads[name]
    causes = (
        ("canary", "the canary"),
        ("source host", f"limit of source host {load.source_host}"),
        ("destination", f"limit of destination {load.destination}"),
        ("of the wave run", "limit of the wave"),
        ("indow", _window_of(run, name)),
        ("starts on", "the wave's start"),
    )
    return next((cause for part, cause in causes if part in why), "others that it waits for")


def _window_of(run: Run, name: str) -> str:
    of = run.scheduler.member(name).window_id
    return f"window {of}" if of else "the windows"
