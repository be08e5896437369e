"""What is known of a member apart from its wave."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds: with a chance of one half, and of 95 %."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a member apart from the wave. `destination`: where its volumes go, with the host: `kvm1/fast`. `outage`:
    from the guest's shutdown to its boot seen; None: not known yet. `placed`: its source has said which host it runs on.
    `unplaced`: why no host of ours takes it yet, in a sentence."""

    source_host: str
    destination: str
    copy: Estimate = Estimate(0, 0)
    outage: Estimate | None = Estimate(0, 0)
    placed: bool = True
    unplaced: str | None = None


UNKNOWN = Facts("unknown", "unknown", outage=None)
