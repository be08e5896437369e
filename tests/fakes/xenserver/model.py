"""XenAPI's data model as xapi publishes it (xenapi.json says from where): which calls there are, of which types, for whom.

The stand-in is held to it: a call that it does not name is refused, and so is an answer that it does not allow.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

NULL = "OpaqueRef:NULL"


class Failure(Exception):
    """An ErrorDescription: code and parameters, as many as the model names."""

    def __init__(self, code: str, *parameters: str) -> None:
        self.description = [code, *parameters]
        super().__init__(code)
        named = _data()["errors"].get(code)
        # What storage managers answer is in no list.
        if not code.startswith("SR_BACKEND_FAILURE_"):
            assert named is not None, f"XenAPI has no error {code}"
            assert len(named) == len(parameters) or named == parameters, f"{code} takes {named}, not {parameters}"


@dataclass(frozen=True)
class Message:
    """`parameters`: name and type each, after the session; the last `optional` of them may be left out."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    result: str
    roles: tuple[str, ...]
    optional: int
    session: bool


@cache
def _data() -> Any:
    return json.loads((Path(__file__).parent / "xenapi.json").read_text())


def classes() -> list[str]:
    return list(_data()["classes"])


def fields(kind: str) -> dict[str, str]:
    return {name: reported[0] for name, reported in _data()["classes"][kind]["fields"].items()}


@cache
def message(method: str) -> Message:
    """Failure MESSAGE_METHOD_UNKNOWN."""
    kind, _, name = method.partition(".")
    found = _data()["classes"].get(kind, {})
    if (reported := found.get("messages", {}).get(name)) is not None:
        p, r, roles, life, session = (
            reported["p"],
            reported["r"],
            reported["roles"],
            reported["life"],
            not reported.get("no_session_param"),
        )
    elif (reported := found.get("implicit", {}).get(name)) is not None:
        p, r, roles, life, session = reported[0], reported[1], reported[2], reported[3], True
    else:
        raise Failure("MESSAGE_METHOD_UNKNOWN", method)
    if str(life).startswith("removed"):
        raise Failure("MESSAGE_REMOVED")
    parameters = tuple((one.split(": ", 1)[0], one.split(": ", 1)[1]) for one in _split(p))
    optional = len(_data()["param_defaults"].get(kind, {}).get(name, {}))
    return Message(method, parameters, r, tuple(_data()["role_sets"].get(roles, ())), optional, session)


def permissions(role: str) -> list[str]:
    """What a role may call: in xapi's spelling, all in lower case."""
    found = []
    for kind, reported in _data()["classes"].items():
        for name in (*reported.get("messages", {}), *reported.get("implicit", {})):
            try:
                if role in message(f"{kind}.{name}").roles:
                    found.append(f"{kind}.{name}".lower())
            except Failure:
                continue
    return found


def _split(parameters: str) -> list[str]:
    """At commas that are in no parentheses."""
    return [one.strip() for one in re.split(r",(?![^(]*\))", parameters) if one.strip()]


def check_parameters(message: Message, given: list[Any]) -> None:
    expected, received = len(message.parameters), len(given)
    if not expected - message.optional <= received <= expected:
        raise Failure("MESSAGE_PARAMETER_COUNT_MISMATCH", message.name, str(expected), str(received))
    for (name, kind), value in zip(message.parameters, given, strict=False):
        if not fits(value, kind):
            raise Failure("FIELD_TYPE_ERROR", name)


def fits(value: Any, kind: str) -> bool:
    """Is the value of this type of the model's?"""
    return _judge(kind)(value)


@cache
def _judge(kind: str) -> Callable[[Any], bool]:
    """Made once a type: thousands of records are judged a second."""
    if kind.endswith(" set"):
        each = _judge(kind.removesuffix(" set"))
        return lambda value: isinstance(value, list) and all(map(each, value))
    if (found := re.fullmatch(r"\((.+?) -> (.+)\) map", kind)) is not None:
        of_key, of_value = _judge(found[1]), _judge(found[2])
        return lambda value: isinstance(value, Mapping) and all(of_key(k) and of_value(v) for k, v in value.items())
    if kind.endswith(" ref"):
        return lambda value: isinstance(value, str) and value.startswith("OpaqueRef:")
    if kind.endswith(" record"):
        reported = {name: _judge(type_) for name, type_ in fields(kind.removesuffix(" record")).items()}
        return lambda value: (
            isinstance(value, Mapping)
            and value.keys() == reported.keys()
            and all(fit(value[name]) for name, fit in reported.items())
        )
    if kind.startswith("enum "):
        allowed = _enum(kind.removeprefix("enum "))
        return lambda value: value in allowed
    if kind == "void":
        return lambda value: not value
    if kind == "bool":
        return lambda value: isinstance(value, bool)
    wanted: dict[str, Any] = {"string": str, "int": int, "float": (float, int), "datetime": datetime}
    type_ = wanted[kind]
    return lambda value: isinstance(value, type_) and not isinstance(value, bool)


@cache
def _enum(name: str) -> frozenset[str]:
    return frozenset(value for reported in _data()["classes"].values() for value in (reported.get("enums") or {}).get(name, ()))


def empty(kind: str) -> Any:
    """What a field of this type holds before anybody set it."""
    if kind.endswith(" set"):
        return []
    if kind.endswith(" map"):
        return {}
    if kind.endswith(" ref"):
        return NULL
    if kind.startswith("enum "):
        return next(iter(sorted(_enum(kind.removeprefix("enum ")))))
    return {"string": "", "int": 0, "float": 0.0, "bool": False, "datetime": datetime(1970, 1, 1)}[kind]  # noqa: DTZ001


def record(kind: str, **given: Any) -> dict[str, Any]:
    """A whole record; AssertionError where the model knows no such field, or another type."""
    reported = fields(kind)
    assert given.keys() <= reported.keys(), f"{kind} has no {given.keys() - reported.keys()}"
    for name, value in given.items():
        assert fits(value, reported[name]), f"{kind}.{name} is a {reported[name]}, not {value!r}"
    return {name: given.get(name, empty(type_)) for name, type_ in reported.items()}
