"""A record is what `dataclass(frozen=True, slots=True, kw_only=True)` makes of the same fields."""

import copy
import dataclasses
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from synvirt import records
from synvirt.records import Record


class Ours(Record):
    """Some fields of each sort."""

    format: Literal["some"] = "some"
    path: str
    secret: str = records.field(default="", repr=False)
    beneath: str | None = records.field(default=None, compare=False)
    parts: tuple[int, ...] = records.field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """The same, by the standard library."""

    format: Literal["some"] = "some"
    path: str
    secret: str = dataclasses.field(default="", repr=False)
    beneath: str | None = dataclasses.field(default=None, compare=False)
    parts: tuple[int, ...] = dataclasses.field(default_factory=tuple)


GIVEN = st.fixed_dictionaries(
    {"path": st.sampled_from("ab")},
    optional={
        "secret": st.sampled_from(["", "s"]),
        "beneath": st.none() | st.sampled_from("cd"),
        "parts": st.lists(st.integers(0, 1), max_size=2).map(tuple),
    },
)


@given(GIVEN, GIVEN)
def test_a_record_compares_hashes_and_shows_itself_as_a_data_class(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert repr(Ours(**one)) == repr(Theirs(**one)).replace("Theirs", "Ours")
    assert (Ours(**one) == Ours(**other)) is (Theirs(**one) == Theirs(**other))
    assert (hash(Ours(**one)) == hash(Ours(**other))) is (hash(Theirs(**one)) == hash(Theirs(**other)))
    assert dataclasses.asdict(Ours(**one)) == dataclasses.asdict(Theirs(**one))
    assert replace(Ours(**one), **other) == Ours(**(one | other))
    assert copy.deepcopy(Ours(**one)) == copy.copy(Ours(**one)) == Ours(**one)


def test_a_record_is_of_its_own_class_alone() -> None:
    class Other(Record):
        path: str

    assert Ours(path="a") != Theirs(path="a")
    assert Other(path="a") != Ours(path="a")
    assert [each.name for each in fields(Ours)] == [each.name for each in fields(Theirs)]


@pytest.mark.parametrize("made", [Ours, Theirs])
def test_a_field_too_few_or_too_many_is_an_error_and_so_is_a_change(made: Any) -> None:
    for wrong in ({}, {"path": "a", "colour": "red"}):
        with pytest.raises(TypeError):
            made(**wrong)
    with pytest.raises(TypeError):
        made("some", "a")
    one = made(path="a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.path = "b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.path
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(one, "colour", "red")


def test_pydantic_and_inspect_take_a_record_for_a_data_class() -> None:
    ours, theirs = TypeAdapter(Ours), TypeAdapter(Theirs)
    content = b'{"format":"some","path":"a","secret":"","beneath":null,"parts":[1]}'
    assert ours.dump_json(ours.validate_json(content)) == theirs.dump_json(theirs.validate_json(content)) == content
    assert ours.validate_json(content) == Ours(path="a", parts=(1,))
    schemas = [{**adapter.json_schema(), "title": "", "description": ""} for adapter in (ours, theirs)]
    assert schemas[0] == schemas[1]
    assert [*signature(Ours).parameters] == [*signature(Theirs).parameters]
    with pytest.raises(ValidationError):
        ours.validate_json(b'{"format":"other","path":"a"}')


def test_a_record_under_another_one_has_the_fields_of_both() -> None:
    class Under(Ours):
        watched: ClassVar[bool] = False
        path: str = "here"
        more: int

    @dataclass(frozen=True, slots=True, kw_only=True)
    class AsUnder(Theirs):
        watched: ClassVar[bool] = False
        path: str = "here"
        more: int

    assert fields(Ours)  # asked of the one above first
    assert repr(fields(Under)) == repr(fields(AsUnder))
    assert repr(AsUnder(more=1)).replace("AsUnder", "Under") == repr(Under(more=1))
    assert [*signature(Under).parameters] == [*signature(AsUnder).parameters]
    assert records.replace(Under(more=1), path="there", secret="s") == Under(more=1, path="there", secret="s")
    assert not Under.watched
    assert not hasattr(Under(more=1), "__dict__")
