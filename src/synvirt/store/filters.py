"""Filters and pages of lists. The documents have what is asked for; columns of it only find rows by an index.

A column is NULL where an earlier version wrote the row: then its document's text is looked through.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, Table, and_, func, or_, select, true, union_all

from synvirt.model.kinds import State
from synvirt.store.tables import CHARS_KEPT, migrations, wave_members

# A document begins with `{"id":"` and the 36 characters of a UUID.
_AFTER_ID = 7 + 36
# Conditions that all must hold. An index finds the rows by the first ones.
Way = list[ColumnElement[bool]]


@dataclass(frozen=True, slots=True)
class Only:
    """A filter; all given fields must fit. `name`: the whole name."""

    states: tuple[State, ...] = ()
    name: str | None = None
    source_id: UUID | None = None
    wave_id: UUID | None = None
    host: str | None = None

    def ways(self) -> list[Way]:
        """A job fits the filter where it fits one of these, and it fits one at most. Each has its rows in the order of their
        numbers."""
        checks = list(self._checks())
        return [[*found, *checks] for found in self._found()]

    def _found(self) -> list[Way]:
        """By that filter which leaves the fewest jobs."""
        states = [migrations.c.state == str(state) for state in dict.fromkeys(self.states)]
        if self.name is not None:
            return [[migrations.c.name == kept(self.name)], [migrations.c.name.is_(None)]]
        if self.wave_id is not None:
            of_wave = select(wave_members.c.job_id).where(wave_members.c.wave_id == str(self.wave_id))
            return [[migrations.c.id.in_(of_wave.where(wave_members.c.job_id.is_not(None)))]]
        begun: list[Way] = [[]]
        if self.source_id is not None:
            begun = [[migrations.c.source_id == str(self.source_id)], [migrations.c.source_id.is_(None)]]
        elif self.host is not None:
            begun = [[migrations.c.host == self.host]]
        return [[*one, state] for one in begun for state in states] if states else begun

    def _checks(self) -> Iterator[ColumnElement[bool]]:
        """All fields again, so that no index is taken for them: without statistics, SQLite would take the one for a state
        rather than the one for a name."""
        if self.states:
            yield migrations.c.state.concat("").in_([str(state) for state in self.states])
        if self.name is not None:
            # Its name follows. LIKE of SQLite would take upper and lower case for the same.
            following = f'","name":{_json(self.name)},'
            yield func.substr(migrations.c.document, _AFTER_ID + 1, len(following)) == following
        if self.source_id is not None:
            yield fields_are(migrations.c.document, {"source_id": [str(self.source_id)]})
        if self.host is not None:
            yield migrations.c.host.concat("") == self.host
        if self.wave_id is not None and self.name is not None:
            of_wave = select(wave_members.c.job_id).where(wave_members.c.wave_id == str(self.wave_id))
            yield migrations.c.id.concat("").in_(of_wave.where(wave_members.c.job_id.is_not(None)))


ALL = Only()


def page_of(table: Table, ways: Sequence[Way], *, limit: int | None, cursor: int | None) -> Select[Any]:
    """`number` and `document` of the rows that fit one of the ways, newest first, before row `cursor`. Each way stops after
    `limit` rows (None: all), and only the documents of the page are read: a sort would carry those of all rows."""
    before = [] if cursor is None else [table.c.number < cursor]
    rows = select(table.c.number, table.c.document).order_by(table.c.number.desc())
    if len(ways) == 1:
        return rows.where(*ways[0], *before).limit(limit)
    numbers = [select(table.c.number).where(*way, *before).order_by(table.c.number.desc()).limit(limit) for way in ways]
    found = union_all(*(select(one.subquery().c.number) for one in numbers)).subquery()
    newest = select(found.c.number).order_by(found.c.number.desc()).limit(limit)
    return rows.where(table.c.number.in_(newest))


def kept(text: str) -> str:
    """What a column that finds rows keeps of a text: an index's entry is short, and names are as long as a platform lets
    them."""
    return text.replace("\0", "")[:CHARS_KEPT]  # PostgreSQL takes none of these


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
