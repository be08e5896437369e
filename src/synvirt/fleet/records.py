"""The stored form of waves: the wave without its members, and a row for each member."""

import json
from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from pydantic import BaseModel

from synvirt.fleet.model import Member, MemberRequest, MemberState, Wave, WaveSummary, WaveUpdate
from synvirt.store.documents import parsed
from synvirt.store.waves import MemberRow, WaveRow

# Part of every Member's document, replaced by the row's value. Quotes inside texts are escaped, so no text contains this.
_WAITS_FOR_NOTHING = '"waits_for":null'


def wave_of(row: WaveRow, members: Iterable[Member] = ()) -> Wave:
    """Unreadable."""
    found = parsed(Wave, row.document, row.version)
    return found.model_copy(update={"members": tuple(members)})


def member_of(row: MemberRow) -> Member:
    """Unreadable."""
    return parsed(Member, row.document, row.version).model_copy(update={"waits_for": row.waits_for})


def new_row(request: MemberRequest) -> MemberRow:
    """The row of a new member, in the state Waiting."""
    fields = {name: getattr(request, name) for name in MemberRequest.model_fields}
    member = Member.model_construct(**fields)  # it was validated when it was received
    return MemberRow(request.id, MemberState.WAITING, member.model_dump_json())


def summary_of(row: WaveRow) -> WaveSummary:
    """A wave as lists show it: with counts by state, without members."""
    wave = wave_of(row)
    fields = {name: getattr(wave, name) for name in WaveSummary.model_fields if name != "counts"}
    counts = {state: row.counts[state] for state in MemberState if state in row.counts}
    return WaveSummary(**fields, counts=counts)


def wave_event(wave: Wave) -> str:
    """The event of its change."""
    return WaveUpdate(id=wave.id, state=wave.state, reason=wave.reason).model_dump_json()


def member_event(wave_id: UUID, member: BaseModel) -> str:
    """The event of a change of a member, as JSON."""
    assert isinstance(member, Member)
    return WaveUpdate(
        id=wave_id,
        member=member.id,
        member_state=member.state,
        job_id=member.job_id,
        cause=member.cause,
        late_s=late_s(member.planned_at, member.cut_over_at) if member.state is MemberState.HEALTHY else None,
    ).model_dump_json()


def late_s(planned_at: datetime | None, cut_over_at: datetime | None) -> float | None:
    """How much later than forecast a cut-over began; None, if it did not begin, or had no forecast."""
    return None if planned_at is None or cut_over_at is None else (cut_over_at - planned_at).total_seconds()


def member_json(row: MemberRow) -> str:
    """A member as answered, without parsing: there may be thousands."""
    if row.waits_for is None:
        return row.document
    return row.document.replace(_WAITS_FOR_NOTHING, f'"waits_for":{json.dumps(row.waits_for)}', 1)


def wave_json(row: WaveRow, members: Iterable[MemberRow]) -> str:
    """The whole wave as answered."""
    head = wave_of(row).model_dump_json(exclude={"members"})
    return f'{head[:-1]},"members":[{",".join(map(member_json, members))}]}}'
