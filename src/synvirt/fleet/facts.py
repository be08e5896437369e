"""Facts of a member that do not come from its wave."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds: p50 and p95."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a member apart from the wave. `destination`: of its volumes, with the host: `kvm1/fast`. `outage`: from the
    guest's shutdown to its boot here; None: not known yet. `placed`: its source has reported which host it runs on. `unplaced`:
    why no host of ours takes it yet, in a sentence. `lost`: the host that has its job, where that is away or fenced."""

    source_host: str
    destination: str
    copy: Estimate = Estimate(0, 0)
    outage: Estimate | None = Estimate(0, 0)
    placed: bool = True
    unplaced: str | None = None
    lost: str | None = None


UNKNOWN = Facts("unknown", "unknown", outage=None)
