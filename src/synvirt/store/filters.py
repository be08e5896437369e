"""Filters of a list of jobs, as SQL over the documents: the rows have only the columns that the engine needs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import ColumnElement, and_, func, or_, select, true

from synvirt.model.kinds import State
from synvirt.store.tables import migrations, wave_members

# A document begins with `{"id":"` and the 36 characters of a UUID.
_AFTER_ID = 7 + 36


@dataclass(frozen=True, slots=True)
class Only:
    """A filter; all given fields must fit. `name`: the whole name."""

    states: tuple[State, ...] = ()
    name: str | None = None
    source_id: UUID | None = None
    wave_id: UUID | None = None
    host: str | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """The filter as SQL conditions, which all must hold."""
        if self.states:
            yield migrations.c.state.in_([str(state) for state in self.states])
        if self.name is not None:
            # Its name follows. LIKE of SQLite would take upper and lower case for the same.
            following = f'","name":{_json(self.name)},'
            yield func.substr(migrations.c.document, _AFTER_ID + 1, len(following)) == following
        if self.source_id is not None:
            yield fields_are(migrations.c.document, {"source_id": [str(self.source_id)]})
        if self.host is not None:
            yield migrations.c.host == self.host
        if self.wave_id is not None:
            of_wave = select(wave_members.c.job_id).where(wave_members.c.wave_id == str(self.wave_id))
            yield migrations.c.id.in_(of_wave.where(wave_members.c.job_id.is_not(None)))


ALL = Only()


def fields_are(document: ColumnElement[str], wanted: Mapping[str, Sequence[str]]) -> ColumnElement[bool]:
    """Whether each of these text fields has one of its values; a field without values has any. A field counts wherever it is in
    the document, but not within another text, where its quotes would be escaped."""
    return and_(
        true(),
        *(
            or_(*(_holds(document, f'"{name}":{_json(value)}') for value in values))
            for name, values in wanted.items()
            if values
        ),
    )


def _holds(document: ColumnElement[str], part: str) -> ColumnElement[bool]:
    # Each database has a function of its own that finds a text, but both have this one; LIKE of SQLite ignores case.
    return func.replace(document, part, "") != document


def _json(text: str) -> str:
    """As pydantic writes it."""
    return json.dumps(text, ensure_ascii=False)
