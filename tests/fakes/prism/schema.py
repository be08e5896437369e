"""Is a request, or an answer, one that Nutanix' schema has? Shares nothing with the adapter, nor with the stand-in's flows."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_SCALARS: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}


class Unknown(Exception):
    """The schema does not have this."""


@cache
def _schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(__file__).with_name(name)).read_text())
    return loaded


@cache
def _templates(name: str) -> list[tuple[str, re.Pattern[str], str]]:
    """(method, path as a pattern, key)."""
    found = []
    for key in _schema(name)["operations"]:
        parts = key.split(" ")
        path = f"/api/{parts[0]}/v4\\.\\d+/{re.escape(parts[2])}" if name == "v4.json" else re.escape(parts[1])
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", path)
        found.append((parts[1] if name == "v4.json" else parts[0], re.compile(pattern), key))
    return found


def operation(method: str, path: str) -> tuple[str, str, dict[str, Any]]:
    """(file, key, shape) of what is asked."""
    for name in ("v4.json", "v3.json"):
        for known, pattern, key in _templates(name):
            if known == method and pattern.fullmatch(path):
                return name, key, _schema(name)["operations"][key]
    raise Unknown(f"there is no operation {method} {path}")


def check_request(method: str, path: str, query: dict[str, str], headers: dict[str, str], body: Any) -> None:
    if method == "OPTIONS" and re.fullmatch(r"/api/\w+/unversioned/info", path):
        return
    name, key, shape = operation(method, path)
    for parameter in query:
        if parameter not in shape["query"]:
            raise Unknown(f"{key} takes no parameter {parameter}")
    if name == "v4.json" and not 1 <= int(query.get("$limit", "50")) <= 100:
        raise Unknown(f"{key}: $limit is 1 to 100")
    if shape["body"] is None:
        if body is not None:
            raise Unknown(f"{key} takes no body")
    else:
        check(name, shape["body"], body, key)
    if name == "v4.json" and method != "GET" and not _UUID.fullmatch(headers.get("ntnx-request-id", "")):
        raise Unknown(f"{key}: NTNX-Request-Id is a UUID")


def check_answer(method: str, path: str, status: int, body: Any) -> None:
    if method == "OPTIONS" or not 200 <= status < 300:
        return
    name, key, shape = operation(method, path)
    if shape["returns"] is not None and body is not None:
        check(name, shape["returns"], body, f"{key} answers")


def check(name: str, kind: str, value: Any, where: str) -> None:
    """Raises Unknown where `value` is not of that type."""
    if kind == "object" or value is None:
        return
    if (inner := re.fullmatch(r"list\[(.*)\]", kind)) is not None:
        if not isinstance(value, list):
            raise Unknown(f"{where}: {value!r:.80} is not a list")
        for number, one in enumerate(value):
            check(name, inner[1], one, f"{where}[{number}]")
    elif (inner := re.fullmatch(r"dict\(str, (.*)\)", kind)) is not None:
        if not isinstance(value, dict):
            raise Unknown(f"{where}: {value!r:.80} is not an object")
        for key, one in value.items():
            check(name, inner[1], one, f"{where}.{key}")
    elif kind in _SCALARS:
        _check_scalar(name, kind, value, where)
    elif kind == "datetime":
        if not isinstance(value, str) or not _TIME.fullmatch(value):
            raise Unknown(f"{where}: {value!r:.80} is no time")
    else:
        _check_named(name, kind, value, where)


def _check_named(name: str, kind: str, value: Any, where: str) -> None:
    shape = _schema(name)["types"].get(kind)
    if shape is None:
        raise Unknown(f"{where}: the type {kind} is in no schema")
    if "enum" in shape:
        if value not in shape["enum"]:
            raise Unknown(f"{where}: {value!r:.80} is none of {shape['enum']}")
        return
    if "one_of" in shape:
        _check_choice(name, shape["one_of"], value, where)
        return
    if not isinstance(value, dict):
        raise Unknown(f"{where}: {value!r:.80} is no {kind}")
    if value.get("$objectType", kind) != kind:
        raise Unknown(f"{where}: its $objectType is {value['$objectType']}, not {kind}")
    _check_fields(name, kind, shape, value, where)


def _check_fields(name: str, kind: str, shape: dict[str, Any], value: dict[str, Any], where: str) -> None:
    for key, one in value.items():
        if key in shape["props"]:
            check(name, shape["props"][key], one, f"{where}.{key}")
        elif not key.startswith("$") and "*" not in shape["props"]:
            raise Unknown(f"{where}: {kind} has no {key}")
    for key in shape.get("required", ()):
        if key not in value:
            raise Unknown(f"{where}: {kind} needs {key}")


def _check_scalar(name: str, kind: str, value: Any, where: str) -> None:
    if not isinstance(value, _SCALARS[kind]) or (kind != "bool" and isinstance(value, bool)):
        raise Unknown(f"{where}: {value!r:.80} is no {kind}")
    if name == "v4.json" and kind == "str" and where.endswith("xtId") and not _UUID.fullmatch(str(value)):
        raise Unknown(f"{where}: {value!r:.80} is no UUID")


def _check_choice(name: str, choices: list[str], value: Any, where: str) -> None:
    """Of several types, the one that the value says itself, or the only one that takes it."""
    if isinstance(value, dict):
        chosen = value.get("$objectType")
        if chosen is None:
            raise Unknown(f"{where}: of several types, and it has no $objectType")
        if chosen not in choices:
            raise Unknown(f"{where}: {chosen} is none of {choices}")
        check(name, chosen, value, where)
        return
    refusals = []
    for choice in choices:
        if isinstance(value, list) == choice.startswith("list["):
            try:
                check(name, choice, value, where)
            except Unknown as error:
                refusals.append(str(error))
            else:
                return
    raise Unknown(f"{where}: {value!r:.80} is none of {choices}: {refusals}")
