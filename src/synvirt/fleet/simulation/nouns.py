"""The nouns of a simulation: what goes in, and what comes out."""

from dataclasses import dataclass

from synvirt.fleet.model import MemberState, WaveForecast
from synvirt.model.plan import Warm
from synvirt.model.values import Model, Time
from synvirt.sizes import MIB

# For a site without measurements: a 10 Gbit/s network, spinning disks, and guests as at other sites.
COPY_BPS_ASSUMED = 150.0 * MIB
HOST_BPS_ASSUMED = 600.0 * MIB
OUTAGE_ASSUMED_S = 180.0
CHANGE_BPS_ASSUMED = 64.0 * 1024
RESIDUALS_ASSUMED = (0.7, 0.8, 0.9, 0.95, 1.0, 1.0, 1.05, 1.15, 1.3, 1.6, 2.2)
# Events within a minute are handled together: a plan to the hour needs no more.
TICK_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a member costs. `outage_s`: shutdown, the last delta's fixed cost, conversion and boot, without the delta's bytes.
    `outage_s` and `change_bps` are None, if the member's own job has not measured them; then the site's are used. `state`,
    `left_bytes`: the progress of a member of a running wave. `delta_bytes`: how large a delta may grow before it is copied."""

    size_bytes: int
    source_host: str
    destination: str
    change_bps: float | None = None
    outage_s: float | None = None
    state: MemberState = MemberState.WAITING
    left_bytes: int | None = None
    delta_bytes: int = Warm().delta_threshold_bytes


@dataclass(frozen=True, slots=True)
class Site:
    """Bytes a second: of one copy, of all from one source host, to one destination, over the network. None: no limit is known.
    `change_bps`, `outage_s`: of a guest without measurements. `residuals`: real duration divided by the forecast one, of jobs
    that ended here."""

    copy_bps: float = COPY_BPS_ASSUMED
    source_host_bps: float | None = HOST_BPS_ASSUMED
    destination_bps: float | None = None
    network_bps: float | None = None
    change_bps: float = CHANGE_BPS_ASSUMED
    outage_s: float = OUTAGE_ASSUMED_S
    residuals: tuple[float, ...] = RESIDUALS_ASSUMED


class MemberForecast(Model):
    """`planned_at`: when its cut-over begins. Null where that never happens; then `reason` says why. Else `reason` says what it
    waited for longest."""

    id: str
    source_host: str
    destination: str
    begins_at: Time | None = None
    ready_at: Time | None = None
    planned_at: Time | None = None
    healthy_at: Time | None = None
    reason: str = ""


class Simulation(Model):
    """`unfinished`: members that never cut over. `forecast` is null where none does."""

    forecast: WaveForecast | None
    members: tuple[MemberForecast, ...]
    unfinished: int
    runs: int
    ends: tuple[Time, ...]
    bottleneck_seconds: dict[str, float]
