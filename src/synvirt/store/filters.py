"""Filters of a list of jobs, as SQL over the documents: the rows have only the columns that the engine needs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import ColumnElement, select

from synvirt.model.kinds import State
from synvirt.store.tables import migrations, wave_members

# The escape character of LIKE. Our documents never have it before a character that it would change.
_ESCAPE = "!"


@dataclass(frozen=True, slots=True)
class Only:
    """A filter; all given fields must fit. `name`: the whole name; upper and lower case differ only on PostgreSQL."""

    states: tuple[State, ...] = ()
    name: str | None = None
    source_id: UUID | None = None
    wave_id: UUID | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """The filter as SQL conditions, which all must hold."""
        if self.states:
            yield migrations.c.state.in_([str(state) for state in self.states])
        if self.name is not None:
            # A document begins with the job's id and its name.
            name = _literal(json.dumps(self.name, ensure_ascii=False))
            yield migrations.c.document.like('{"id":"' + "_" * 36 + f'","name":{name},%', escape=_ESCAPE)
        if self.source_id is not None:
            yield migrations.c.document.like(f'%"source!_id":"{self.source_id}"%', escape=_ESCAPE)
        if self.wave_id is not None:
            of_wave = select(wave_members.c.job_id).where(wave_members.c.wave_id == str(self.wave_id))
            yield migrations.c.id.in_(of_wave.where(wave_members.c.job_id.is_not(None)))


ALL = Only()


def _literal(text: str) -> str:
    for special in (_ESCAPE, "%", "_"):
        text = text.replace(special, _ESCAPE + special)
    return text
