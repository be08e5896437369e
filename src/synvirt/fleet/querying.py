"""Waves made from a query: «all powered-on VMs of folder X». The VMs are chosen here from the source's list.

A word of the query that matches nothing is an error with the nearest existing word. Otherwise a misspelled folder would leave
its VMs out of the wave without notice.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, StringConstraints

from synvirt.errors import BadRequest
from synvirt.fleet.member_ids import ids
from synvirt.fleet.model import MEMBERS_MAX, MemberRequest, WaveRequest
from synvirt.fleet.sheets.rows import KnownVm
from synvirt.live import VmRow
from synvirt.model.values import Name, Received

Word = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
# How many near places are shown for a word that matches none.
_NEAREST = 3


class VmQuery(Received):
    """Body of POST /waves/select: what a VM of `source_id` must be to become a member; what is left out is asked of none.
    `vm`: a pattern of names, `web-*`. `folder`: a path as the list of VMs shows it, with all below. `guest_os`: a part of its
    name. Upper and lower case make no difference in both. `name`: the wave's."""

    source_id: UUID
    name: Name
    vm: Word | None = None
    folder: Word | None = None
    host: Word | None = None
    power_state: Literal["on", "off", "suspended"] | None = None
    guest_os: Word | None = None
    outage_budget_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None


def wave_of_query(query: VmQuery, known: Sequence[KnownVm], rows: Iterable[VmRow]) -> WaveRequest:
    """BadRequest, if no VM matches, or too many do."""
    by_id = {one.vm_id: one for one in known}
    left = sorted(rows, key=lambda row: (row.name.casefold(), row.vm_id))
    for what, wanted, fits, of in _conditions(query):
        if wanted is None:
            continue
        found = [row for row in left if fits(row, wanted.casefold())]
        if not found:
            raise _no_match(what, wanted, {of(row) for row in left} - {""})
        left = found
    if not left:
        raise BadRequest("the source has no VMs", hint="our user may not see them: a test of the source lists what it lacks")
    if len(left) > MEMBERS_MAX:
        raise BadRequest(f"{len(left)} VMs are meant, and a wave has {MEMBERS_MAX} at most", hint="ask for fewer: by folder")
    members = [
        MemberRequest(id=id_, vm=_printable(row.name) or id_, plan=by_id[row.vm_id].plan, outage_budget_s=query.outage_budget_s)
        for id_, row in zip(ids(row.name for row in left), left, strict=True)
    ]
    return WaveRequest(name=query.name, members=tuple(members))


_Condition = tuple[str, str | None, Callable[[VmRow, str], bool], Callable[[VmRow], str]]


def _conditions(query: VmQuery) -> tuple[_Condition, ...]:
    return (
        ("folder", query.folder, lambda row, word: _is_beneath(row.folder.casefold(), word), lambda row: row.folder),
        ("host", query.host, lambda row, word: row.host.casefold() == word, lambda row: row.host),
        ("power_state", query.power_state, lambda row, word: row.power_state == word, lambda row: row.power_state),
        ("guest_os", query.guest_os, lambda row, word: word in row.guest_os.casefold(), lambda row: row.guest_os),
        ("vm", query.vm, lambda row, word: fnmatchcase(row.name.casefold(), word), lambda row: row.name),
    )


def _is_beneath(folder: str, word: str) -> bool:
    wanted = word.strip("/")
    return folder.strip("/") == wanted or folder.strip("/").startswith(f"{wanted}/")


def _no_match(what: str, wanted: str, there: set[str]) -> BadRequest:
    """The error of a word that matches none of the VMs left by the words before it."""
    nearest = difflib.get_close_matches(wanted, sorted(there), n=_NEAREST, cutoff=0.4) or sorted(there)[:_NEAREST]
    hint = f"there is {', '.join(nearest)}" if nearest else "the source reports no value of it for any of them"
    return BadRequest(f"{what}: no VM that matches so far has {wanted!r}", hint=hint[:300])


def _printable(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())[:255].strip()
