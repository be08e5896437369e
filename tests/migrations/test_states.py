"""The state table has the rows of the specification's part 3 and one for repairs; no job gets stuck or goes astray."""

from itertools import product

import pytest

from synvirt.migrations.states import ROWS, Facts, may_move, next_state
from synvirt.migrations.steps import STEPS
from synvirt.model.kinds import ENDS, State

ALL_FACTS = [Facts(*values) for values in product([False, True], repeat=4)]
RUNNING = [state for state in State if state not in ENDS]

SPECIFIED = [
    (State.QUEUED, Facts(), State.COPYING_FULL),
    (State.COPYING_FULL, Facts(warm=True), State.DELTA_SYNCING),
    (State.COPYING_FULL, Facts(warm=True, prepare=True), State.DELTA_SYNCING),
    (State.COPYING_FULL, Facts(prepare=True), State.V2V_PROCESSING),
    (State.COPYING_FULL, Facts(), State.STARTING),
    (State.DELTA_SYNCING, Facts(warm=True), State.DELTA_SYNCING),
    (State.DELTA_SYNCING, Facts(warm=True, converged=True), State.CUTTING_OVER),
    (State.CUTTING_OVER, Facts(warm=True, prepare=True), State.V2V_PROCESSING),
    (State.CUTTING_OVER, Facts(warm=True), State.STARTING),
    (State.V2V_PROCESSING, Facts(prepare=True), State.STARTING),
    (State.STARTING, Facts(), State.COMPLETED),
    (State.COPYING_FULL, Facts(repair=True), State.COMPLETED),
]


@pytest.mark.parametrize(("state", "facts", "expected"), SPECIFIED)
def test_the_rows_of_the_specification(state: State, facts: Facts, expected: State) -> None:
    assert next_state(state, facts) == expected


@pytest.mark.parametrize("state", RUNNING)
@pytest.mark.parametrize("facts", ALL_FACTS)
def test_every_running_state_has_a_next_whatever_the_facts(state: State, facts: Facts) -> None:
    assert may_move(state, next_state(state, facts))


@pytest.mark.parametrize("state", RUNNING)
def test_every_running_state_has_a_step_and_can_fail_and_be_cancelled(state: State) -> None:
    assert state in STEPS
    assert may_move(state, State.FAILED)
    assert may_move(state, State.CANCELLED)


@pytest.mark.parametrize("end", sorted(ENDS))
@pytest.mark.parametrize("to", list(State))
def test_an_end_is_an_end(end: State, to: State) -> None:
    assert not may_move(end, to)


def test_every_end_and_state_is_reached() -> None:
    assert {row.next for row in ROWS} == set(State) - {State.QUEUED, State.FAILED, State.CANCELLED}
