"""Frozen data classes as JSON and back, checked: what `wire` sends and what the specs are made of.

pydantic does the same, but importing it takes half of a worker's start, and a stopped guest waits for that. So both sides use
this. It knows data classes, str, int, float, bool, None, UUID, `Any`, Literal, unions of them, tuples and dicts. It converts
only UUIDs and the keys of dicts; a missing or unknown field is an error.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin
from uuid import UUID

_Read = Callable[[Any], Any]

# The field by which the data classes of a union are distinguished, if they have one.
_TAGS = ("format", "message", "kind")


class _Wrong(ValueError):
    """`path`: from the value outwards. The text does not contain the value, which may be a password."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why, self.path = why, list[str]()

    def __str__(self) -> str:
        return f"{'.'.join(reversed(self.path)) or 'it'}: {self.why}"


def dump(value: Any) -> bytes:
    """The value as one line of ASCII JSON, so that a lone surrogate in a file's name is kept."""
    return json.dumps(value, default=_plain, separators=(",", ":")).encode("ascii")


def plain(value: Any) -> Any:
    """As `json.loads` would give it."""
    return json.loads(dump(value))


def load(kind: Any, text: bytes | str) -> Any:
    """The value in a JSON text. ValueError, which names the field and does not quote the text."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    return read(kind, content)


def read(kind: Any, content: Any) -> Any:
    """The value in `content`, which `json.loads` gave. ValueError, as `load`."""
    try:
        return _reader(kind)(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


@cache
def _reader(kind: Any) -> _Read:
    """The reader of a kind. The fields of a data class are read at its first value, as specs contain each other."""
    if (made := _OF_PARTS.get(get_origin(kind))) is not None:
        return made(get_args(kind))
    if dataclasses.is_dataclass(kind):
        return lambda value: _fields(kind)(value)  # type: ignore[arg-type]  # noqa: PLW0108 - later than here
    return _WITHOUT_PARTS.get(kind) or _scalar(kind)


def _scalar(kind: type) -> _Read:
    accepted = (float, int) if kind is float else (kind,)

    def scalar(value: Any) -> Any:
        if type(value) not in accepted:  # True is no number
            raise _Wrong(f"is not of type {kind.__name__}")
        return value

    return scalar


def _uuid(value: Any) -> UUID:
    try:
        return UUID(_scalar(str)(value))
    except ValueError:
        raise _Wrong("is not a UUID") from None


def _literal(choices: tuple[Any, ...]) -> _Read:
    def literal(value: Any) -> Any:
        if not isinstance(value, str | int) or value not in choices:
            raise _Wrong(f"is none of {', '.join(map(str, choices))}")
        return value

    return literal


def _tuple(kinds: tuple[Any, ...]) -> _Read:
    many = kinds[-1:] == (Ellipsis,)
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read_tuple(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not (many or len(value) == len(readers)):
            raise _Wrong("is not a list" if many else f"is not a list of {len(readers)}")
        if many:
            (item,) = readers
            try:
                return tuple(map(item, value))
            except _Wrong as wrong:
                wrong.path.append("[]")
                raise
        return tuple(reader(part) for reader, part in zip(readers, value, strict=True))

    return read_tuple


def _dict(kinds: tuple[Any, ...]) -> _Read:
    keys, values = kinds
    read_value, read_key = _reader(values), int if keys is int else _reader(keys)

    def read_dict(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _Wrong("is not an object")
        try:
            return {read_key(key): read_value(part) for key, part in value.items()}
        except _Wrong:
            raise
        except ValueError:
            raise _Wrong("has a key that is not a number") from None

    return read_dict


def _union(kinds: tuple[Any, ...]) -> _Read:
    tagged: dict[tuple[str, Any], _Read] = {}
    others: list[_Read] = []
    for kind in (one for one in kinds if one is not types.NoneType):
        tags = [one for one in dataclasses.fields(kind) if one.name in _TAGS] if dataclasses.is_dataclass(kind) else []
        if tags and isinstance(tags[0].default, str):
            tagged[tags[0].name, tags[0].default] = _reader(kind)
        else:
            others.append(_reader(kind))

    def read_union(value: Any) -> Any:
        if value is None and types.NoneType in kinds:
            return None
        if isinstance(value, dict):
            for name in _TAGS:
                found = value.get(name)
                if isinstance(found, str) and (name, found) in tagged:
                    return tagged[name, found](value)
        wrong = _Wrong("is nothing that is known here")
        for reader in others:
            try:
                return reader(value)
            except _Wrong as one:
                wrong = one if isinstance(value, dict) else wrong
        raise wrong

    return read_union


@cache
def _fields(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind)
    readers = {one.name: _reader(hints[one.name]) for one in dataclasses.fields(kind)}
    required = {
        one.name
        for one in dataclasses.fields(kind)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }

    def read_object(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong("is not an object")
        if missing := required - value.keys():
            raise _Wrong(f"lacks {min(missing)}")
        if value.keys() - readers.keys():
            raise _Wrong("has a field that is not known")
        found = {}
        for name, part in value.items():
            try:
                found[name] = readers[name](part)
            except _Wrong as wrong:
                wrong.path.append(name)
                raise
        return kind(**found)

    return read_object


_WITHOUT_PARTS: Mapping[Any, _Read] = {Any: lambda value: value, UUID: _uuid}
_OF_PARTS: Mapping[Any, Callable[[tuple[Any, ...]], _Read]] = {
    Literal: _literal,
    Union: _union,
    types.UnionType: _union,
    tuple: _tuple,
    dict: _dict,
}
