"""The state machine of a job, as data. Rule: everything that decides a job's next state is in this file.

    Queued ─▶ CopyingFull ─▶ DeltaSyncing ─▶ CuttingOver ─▶ V2vProcessing ─▶ Starting ─▶ Completed
                  │              ▲  │ not converged   │            ▲            ▲
                  │              └──┘                 └────────────│────────────┤
                  ├────────────── cold, offline ───────────────────┴────────────┘
                  └─▶ Completed: a repair, which has nothing to start
    any state that is no end ─▶ Failed │ Cancelled

`ROWS` is specification part 3, row for row, and one row for repairs. The first row with the job's state and a condition that
holds gives the next state. The downgrade from Warm to Cold is no state: it settles `warm` before the first byte.
"""

from collections.abc import Callable
from dataclasses import dataclass

from synvirt.model.kinds import ENDS, State


@dataclass(frozen=True, slots=True)
class Facts:
    """What a finished step returns. `warm`: the job's effective mode; `prepare`: the guest needs drivers (Windows);
    `converged`: the last delta was small enough, and the operator does not hold the cut-over; `repair`: the job repairs the
    volumes of another job."""

    warm: bool = False
    prepare: bool = False
    converged: bool = False
    repair: bool = False


Condition = Callable[[Facts], bool]


def always(_facts: Facts) -> bool:
    return True


def warm(facts: Facts) -> bool:
    return facts.warm


def prepare(facts: Facts) -> bool:
    return facts.prepare


def converged(facts: Facts) -> bool:
    return facts.converged


def repair(facts: Facts) -> bool:
    return facts.repair


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: in `state`, if `condition` holds, the job goes to `next`."""

    state: State
    condition: Condition
    next: State


ROWS = (
    Row(State.QUEUED, always, State.COPYING_FULL),
    Row(State.COPYING_FULL, repair, State.COMPLETED),
    Row(State.COPYING_FULL, warm, State.DELTA_SYNCING),
    Row(State.COPYING_FULL, prepare, State.V2V_PROCESSING),
    Row(State.COPYING_FULL, always, State.STARTING),
    Row(State.DELTA_SYNCING, converged, State.CUTTING_OVER),
    Row(State.DELTA_SYNCING, always, State.DELTA_SYNCING),
    Row(State.CUTTING_OVER, prepare, State.V2V_PROCESSING),
    Row(State.CUTTING_OVER, always, State.STARTING),
    Row(State.V2V_PROCESSING, always, State.STARTING),
    Row(State.STARTING, always, State.COMPLETED),
)

# The kinds of ledger entries that a complete copy has.
COPY: frozenset[str] = frozenset({"volume", "hashes"})
# Those that are kept when a job fails in a state. A complete copy may have taken nights, so it stays, even if deltas are still
# to come. A cancel keeps nothing.
KEPT_ON_FAILURE: dict[State, frozenset[str]] = {
    State.DELTA_SYNCING: COPY,
    State.CUTTING_OVER: COPY,
    State.V2V_PROCESSING: COPY,
    State.STARTING: COPY | {"screenshot"},
}


def next_state(state: State, facts: Facts) -> State:
    return next(row.next for row in ROWS if row.state == state and row.condition(facts))


def may_move(state: State, to: State) -> bool:
    """Whether a job in `state` may go to `to`. An ended job goes nowhere."""
    if state in ENDS:
        return False
    return to in (State.FAILED, State.CANCELLED) or any(row.state == state and row.next == to for row in ROWS)
