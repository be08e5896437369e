"""Changes of waves and members as rows: by people (`waves`), by who leads (`carrying`), by each host (`host_side`).

Each change names the states that it expects, and does nothing where another host was first.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

from synvirt.errors import Conflict, NotFound
from synvirt.fleet.model import ALL_STATES, GOING, RUNS, UNBEGUN, Member, MemberState, Wave, WaveState
from synvirt.fleet.records import member_event, member_of, wave_event
from synvirt.fleet.webhooks import events as hooks
from synvirt.store.waves import MemberChange, WaveChange, WaveRows


def change_members(
    rows: WaveRows,
    wave_id: UUID,
    members: Iterable[Member],
    expected: Iterable[MemberState],
    fields: Mapping[str, object],
    *,
    submitted: bool | None = None,
    rolling_back: bool | None = None,
) -> list[str]:
    """Changes members that are still in one of `expected`, and have the same job as before. Their other fields stay as they are
    now: one may have been approved meanwhile."""
    each = partial(member_change, expected=expected, fields=fields, submitted=submitted, rolling_back=rolling_back)
    return make_changes(rows, wave_id, [each(one) for one in members])


def member_change(
    one: Member,
    expected: Iterable[MemberState],
    fields: Mapping[str, object],
    *,
    submitted: bool | None = None,
    rolling_back: bool | None = None,
) -> MemberChange:
    """A change of one member, as `change_members` makes it."""

    def changed(known: Member) -> Member | None:
        return None if known.job_id != one.job_id else known.model_copy(update={**fields, "waits_for": None})

    return MemberChange(one.id, frozenset(expected), Member, changed, submitted=submitted, rolling_back=rolling_back)


def make_changes(
    rows: WaveRows, wave_id: UUID, changes: Sequence[MemberChange], *, of_wave: WaveChange | None = None
) -> list[str]:
    """Makes all changes that still fit, in one transaction. The ids of the changed members."""
    if not changes:
        return []
    return rows.change_members(
        wave_id, changes, lambda document: member_event(wave_id, document), hooks.of_member, of_wave=of_wave
    )


def hold_for(rows: WaveRows, wave_id: UUID, reason: str, *, hook_id: UUID | None = None) -> None:
    """Holds a running wave until an operator lets it go on. `hook_id`: of a required webhook, of which also a held one says so.
    The wave does not wait for it again: the operator has seen the reason."""

    def held(before: Wave) -> Wave:
        kept = tuple(one.model_copy(update={"required": False}) if one.id == hook_id else one for one in before.hooks)
        said = f"{before.reason} " if before.state is WaveState.HELD and before.reason else ""
        return before.model_copy(update={"state": WaveState.HELD, "reason": f"{said}{reason}", "hooks": kept})

    with suppress(Conflict, NotFound):  # it is held already, or has ended
        states = frozenset({WaveState.RUNNING}) if hook_id is None else GOING
        rows.change(wave_id, states, held, Wave, wave_event, deliveries=hooks.of_wave)


def roll_back(rows: WaveRows, wave_id: UUID, members: Iterable[Member], cause: str) -> list[str]:
    """Stores the request, so that the job's host does it (`host_side`). Rolled back members stay as they are, and those that
    have another job by now. The ids of the others."""
    # Whatever state another host has moved it to meanwhile.
    expected = ALL_STATES - {MemberState.ROLLED_BACK}
    changes = [
        member_change(one, expected, {"cause": one.cause or cause}, rolling_back=True) for one in members if not one.is_back
    ]
    return make_changes(rows, wave_id, changes)


def roll_group_back(rows: WaveRows, wave: Wave, failed: Member) -> None:
    """Rolls back the others of its group; those that have not begun are skipped. `wave` may be out of date: another host may
    lead, and change them meanwhile."""
    names = {one.id for one in wave.members if one.group == failed.group and one.group is not None and one.id != failed.id}
    cause = f"{failed.id} of its group failed."
    while names:
        seen = [row for row in rows.members(wave.id)[0] if row.member_id in names and not row.rolling_back]
        left = [one for one in map(member_of, seen) if not one.is_back]
        unbegun = [one for one in left if one.job_id is None]
        change_members(rows, wave.id, unbegun, UNBEGUN, {"state": MemberState.SKIPPED, "cause": cause})
        begun = [one for one in left if one.job_id is not None]
        roll_back(rows, wave.id, begun, cause)
        names = {one.id for one in left}


def failed(rows: WaveRows, wave: Wave, member: Member, cause: str) -> None:
    """Applies the wave's rule first: after a crash in between, the member is unchanged, and both are done again."""
    if wave.on_failure == "stop":
        reason = f"{member.id} failed: {cause}"
        hold_for(rows, wave.id, reason)
    elif wave.on_failure == "roll_back":
        roll_group_back(rows, wave, member)
    back = wave.on_failure == "roll_back" and member.job_id is not None
    fields = {"state": MemberState.FAILED, "cause": cause}
    change_members(rows, wave.id, [member], RUNS, fields, rolling_back=back or None)
