"""The forecast of a warm job's cut-over: how fast the guest changes, and how fast its changes are copied. No I/O.

pass      1 full ───────▶ 2 delta ──▶ 3 delta ─▶ …  final
snapshot  t1              t2          t3            change rate = bytes of a delta / time since the snapshot before
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from synvirt.model.job import Forecast, Pass
from synvirt.sizes import MIB

# Guests do not change evenly: the last few deltas show more than the last one.
DELTAS_LOOKED_AT = 3
# Limits of the pause between deltas of a held job, if the plan sets none. The next delta is due when it is as large as a
# cut-over may copy. Each needs a snapshot of a running guest; Forklift takes one an hour, others one every ten minutes.
HOLD_LEAST_S, HOLD_MOST_S = 300.0, 3600.0
# A shorter copy measures connecting, not copying.
MEASURED_LEAST_S = 0.5


def forecast(passes: Sequence[Pass], *, at: datetime) -> Forecast | None:
    """The forecast. None, before the first delta has been copied."""
    done = [one for one in passes if one.finished_at is not None and one.snapshot_at is not None]
    rate = _change_rate(done)
    throughput = _throughput(done)
    if rate is None or throughput is None:
        return None
    last = done[-1]
    # The changes until the guest is off count from the last snapshot, which was made when its pass began.
    since_s = (at - last.snapshot_at).total_seconds() if last.snapshot_at is not None else last.seconds
    expected = int(rate * max(since_s, 0.0))
    return Forecast(
        change_rate_bps=round(rate, 1),
        throughput_bps=round(throughput, 1),
        expected_delta_bytes=expected,
        expected_downtime_s=round(_fixed_s(done, throughput) + expected / throughput, 3),
        converges=round(rate, 1) < round(throughput, 1),
        at=at,
    )


def hold_interval_s(
    change_bps: float, threshold_bytes: int, *, least_s: float = HOLD_LEAST_S, most_s: float = HOLD_MOST_S
) -> float:
    """The seconds that a held job waits between two deltas. `threshold_bytes`: the most that a cut-over may copy."""
    return most_s if not change_bps else min(max(threshold_bytes / change_bps, least_s), most_s)


def why_not(passes: Sequence[Pass]) -> str:
    """Why the deltas do not become small, in words for people."""
    deltas = [one for one in passes if one.kind == "delta" and one.finished_at is not None]
    done = [one for one in passes if one.finished_at is not None and one.snapshot_at is not None]
    rate, throughput = _change_rate(done), _throughput(done)
    sizes = ", ".join(f"{one.bytes / MIB:.1f}" for one in deltas[-5:])
    reason = f"its last deltas had {sizes} MiB"
    if rate is None or throughput is None:
        return reason
    reason += f"; it changes {rate / MIB:.1f} MiB/s, and {throughput / MIB:.1f} MiB/s are copied"
    if rate >= throughput:
        return f"{reason}: it changes faster than it is copied, and more passes would not help"
    return f"{reason}: what changes during one pass is too much for the next"


def _change_rate(done: Sequence[Pass]) -> float | None:
    """Bytes a second over the last deltas."""
    pairs = [(before, one) for before, one in pairwise(done) if one.kind == "delta" and not one.whole]
    changed = elapsed = 0.0
    for before, one in pairs[-DELTAS_LOOKED_AT:]:
        if before.snapshot_at is not None and one.snapshot_at is not None:
            changed += one.bytes
            elapsed += max((one.snapshot_at - before.snapshot_at).total_seconds(), 0.001)
    return changed / elapsed if elapsed else None


def _throughput(done: Sequence[Pass]) -> float | None:
    """The rate of the pass that copied most: small ones measure the fixed cost of a pass."""
    largest = max(done, key=lambda one: one.bytes, default=None)
    if largest is None or not largest.bytes:
        return None
    return largest.bytes / max(largest.seconds, MEASURED_LEAST_S)


def _fixed_s(done: Sequence[Pass], throughput: float) -> float:
    """The fixed cost of a pass in seconds (the snapshot, the worker, the connections), from the shortest delta so far."""
    spent = [one.seconds - one.bytes / throughput for one in done if one.kind != "full"]
    return max(0.0, min(spent, default=0.0))
