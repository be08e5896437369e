"""A record in the VM's notes of what we have made of it, as recovery snapshots and reference points have no names. No I/O.

    #SYNVIRT# {"synvirt-7b…-2": {"s": "GUID of the snapshot", "p": "InstanceID of the reference point", …}}

One line at the end of the notes, which moves with the VM to another host of its cluster, and is removed with our last object.
It is written before an object is made, and lists what existed by then: only what came since is ours.
"""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import Field, StringConstraints, ValidationError

from synvirt.model.values import Model

MARK: Final = "#SYNVIRT# "
# One job at a time moves a VM, and has at most two snapshots; a test of its source may leave one.
ENTRIES_MAX: Final = 64

_LINE: Final = re.compile(r"(\r?\n)?^#SYNVIRT# [^\r\n]*", re.MULTILINE)
_Id = Annotated[str, StringConstraints(max_length=512)]


class Entry(Model):
    """`s`: the snapshot's id, empty while it is unknown. `b`: the recovery snapshots that existed before it was made. `x`: the
    folder that its disks are exported to, if any; `e`: for each export there, Hyper-V's job, or that it is complete. `p`: the
    reference point that it became. `q`: the reference points before that. `sure`: Hyper-V itself has reported `p`; one that was
    found later may be removed, but is never used for changes."""

    s: _Id = ""
    b: Annotated[tuple[_Id, ...], Field(max_length=256)] = ()
    p: _Id = ""
    q: Annotated[tuple[_Id, ...], Field(max_length=256)] | None = None
    sure: bool = True
    x: Annotated[str, StringConstraints(max_length=2048)] = ""
    e: Annotated[dict[_Id, _Id], Field(max_length=16)] = Field(default_factory=dict)


Journal = dict[str, Entry]


def read(notes: str) -> Journal:
    """An administrator may have edited the notes: invalid entries are ignored."""
    for line in notes.splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line.removeprefix(MARK))
                return {str(name): Entry.model_validate(one) for name, one in list(found.items())[:ENTRIES_MAX]}
            except (ValueError, AttributeError, ValidationError, RecursionError):
                return {}
    return {}


def written(notes: str, journal: Journal) -> str:
    """The notes with this journal instead of their present one; with an empty one as they were before us."""
    own = _LINE.sub("", notes)
    if not journal:
        return own
    entries = {name: one.model_dump(mode="json", exclude_defaults=True) for name, one in journal.items()}
    return f"{own}{chr(10) if own else ''}{MARK}{json.dumps(entries, separators=(',', ':'))}"


def noted(notes: str, note: str) -> str:
    """The notes with a line for people, above the journal."""
    own = _LINE.sub("", notes)
    if note in own.splitlines():
        return notes
    return written(f"{own}{chr(10) if own else ''}{note}", read(notes))


def only_new(present: Iterable[str], before: Iterable[str]) -> str | None:
    """The only one that came since; None, where there is none, or more than one."""
    known = set(before)
    new = [one for one in present if one not in known]
    return new[0] if len(new) == 1 else None


def same_job(name: str, other: str) -> bool:
    """The names of a job's snapshots differ only in the number after their last dash."""
    return name.rpartition("-")[0] == other.rpartition("-")[0]
