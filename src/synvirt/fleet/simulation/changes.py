"""What if: the same wave with other numbers, and what that changes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from synvirt.fleet.model import Wave, WaveLimits, WaveRequest
from synvirt.fleet.simulation.nouns import TICK_S, Load, Simulation, Site
from synvirt.fleet.words import shown_time
from synvirt.model.windows import Window
from synvirt.sizes import duration


@dataclass(frozen=True, slots=True)
class Change:
    """Other numbers. `more_destinations`: this many hosts more, like those that there are; they take their share of the VMs."""

    more_destinations: int = 0
    network_bps: float | None = None
    source_host_bps: float | None = None
    limits: WaveLimits | None = None
    windows: tuple[Window, ...] | None = None


def changed(
    wave: WaveRequest | Wave, loads: Mapping[str, Load], site: Site, change: Change
) -> tuple[WaveRequest | Wave, dict[str, Load], Site]:
    """The wave, the loads and the site with other numbers. A window of `change.windows` replaces the one with its id."""
    updates: dict[str, Any] = {}
    if change.limits is not None:
        updates["limits"] = change.limits
    if change.windows is not None:
        new = {window.id: window for window in change.windows}
        kept = tuple(new.pop(window.id, window) for window in wave.windows)
        updates["windows"] = (*kept, *new.values())
    site = replace(
        site,
        network_bps=change.network_bps if change.network_bps is not None else site.network_bps,
        source_host_bps=change.source_host_bps if change.source_host_bps is not None else site.source_host_bps,
    )
    return wave.model_copy(update=updates), _spread(loads, change.more_destinations), site


def difference_in_words(before: Simulation, after: Simulation) -> str:
    """How the second simulation differs from the first, in a sentence."""
    if before.forecast is None or after.forecast is None:
        return f"{before.unfinished} VMs never cut over before, {after.unfinished} after."
    seconds = (before.forecast.ends_p50 - after.forecast.ends_p50).total_seconds()
    what = "as late" if abs(seconds) < TICK_S else f"{duration(abs(seconds))} {'sooner' if seconds > 0 else 'later'}"
    summary = f"It ends {what}, on {shown_time(after.forecast.ends_p50)} (p95 {shown_time(after.forecast.ends_p95)})"
    moved = before.unfinished - after.unfinished
    if moved:
        summary += f"; {abs(moved)} {'more' if moved > 0 else 'fewer'} VMs cut over"
    return f"{summary}. Bottleneck: {after.forecast.bottleneck}"


def _spread(loads: Mapping[str, Load], more: int) -> dict[str, Load]:
    """The loads, spread over `more` new destinations too: each takes as many members as each of the others keeps."""
    before = len({load.destination for load in loads.values()})
    if more <= 0 or before == 0:
        return dict(loads)
    found: dict[str, Load] = {}
    seen: dict[str, int] = {}
    for name, load in loads.items():
        place = seen[load.destination] = seen.get(load.destination, -1) + 1
        turn = place % (before + more)
        found[name] = load if turn < before else replace(load, destination=f"new-{turn - before + 1}")
    return found
