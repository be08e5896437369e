"""The vendor's schema as a judge of both sides: what is asked of the API, and what the stand-in answers."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool, int),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


_BOOLEANS = ("0", "1", "on", "off", "yes", "no", "true", "false")


@cache
def loaded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "api.json").read_text())
    return found


def route(method: str, path: str) -> tuple[str, dict[str, Any], dict[str, str]] | None:
    """(path of the schema, what it says, what the gaps hold)."""
    for known, methods in loaded()["paths"].items():
        pattern = re.sub(r"\\\{([a-z]+)\\\}", r"(?P<\1>[^/]+)", re.escape(known))
        if method in methods and (found := re.fullmatch(pattern, path)):
            return known, methods[method], found.groupdict()
    return None


def wrong_request(method: Mapping[str, Any], path: str, given: Mapping[str, str]) -> dict[str, str]:
    """What Proxmox VE would answer 400 with: a parameter a line."""
    params = dict(method["params"])
    for name in method.get("same_as_config_POST", ()):
        params[name] = loaded()["paths"][path]["POST"]["params"][name]
    errors = {name: "property is missing and it is not optional" for name in method["required"] if name not in given}
    for name, text in given.items():
        about = params.get(name) or params.get(re.sub(r"[0-9]+$", "[n]", name))
        if about is None:
            errors[name] = "property is not defined in schema and the schema does not allow additional properties"
        elif why := _wrong_text(text, about):
            errors[name] = why
    return errors


def _wrong_text(text: str, about: Mapping[str, Any]) -> str | None:
    kind = about.get("type", "string")
    if kind == "boolean":
        return None if text.lower() in _BOOLEANS else "type check ('boolean') failed"
    if kind in ("integer", "number"):
        if not re.fullmatch(r"-?[0-9]+" if kind == "integer" else r"-?[0-9.]+", text):
            return f"type check ('{kind}') failed"
        if float(text) < about.get("minimum", float("-inf")) or float(text) > about.get("maximum", float("inf")):
            return "value is out of its bounds"
    if "enum" in about and text not in about["enum"]:
        return "value does not have a value in the enumeration"
    if len(text) > about.get("maxLength", 1 << 20):
        return "value is too long"
    return None


def wrong_answer(method: Mapping[str, Any], path: str, answer: Any) -> str | None:
    """Why the vendor's own API would not have answered this."""
    returns = dict(method.get("returns", {}))
    if "returns_same_as_config_POST" in method:
        params = loaded()["paths"][path]["POST"]["params"]
        same = {name: {**params[name], "optional": 1} for name in method["returns_same_as_config_POST"]}
        returns = {**returns, "properties": {**same, **returns.get("properties", {})}}
    return _wrong(answer, returns, "answer")


def _wrong(value: Any, about: Mapping[str, Any], where: str) -> str | None:
    kind = about.get("type", "object")
    is_of_kind: bool = isinstance(value, _TYPES[kind])
    if not is_of_kind or (kind in ("integer", "number", "string") and isinstance(value, bool)):
        return f"{where}: {value!r} is no {kind}"
    if "enum" in about and value not in about["enum"]:
        return f"{where}: {value!r} is none of {about['enum']}"
    if kind == "array" and "items" in about:
        judged = (_wrong(one, about["items"], f"{where}[{number}]") for number, one in enumerate(value))
        return next((why for why in judged if why), None)
    if kind == "object" and "properties" in about:
        return _wrong_members(value, about["properties"], where)
    form = str(about.get("format", ""))
    if form.startswith("$") and form[1:] in loaded()["formats"]:
        return _wrong_property_string(value, loaded()["formats"][form[1:]], where)
    return None


def _wrong_members(value: Mapping[str, Any], properties: Mapping[str, Any], where: str) -> str | None:
    for name, one in value.items():
        about = properties.get(name) or properties.get(re.sub(r"[0-9]+$", "[n]", name))
        if about is None:
            return f"{where}: {name!r} is not known"
        if why := _wrong(one, about, f"{where}.{name}"):
            return why
    lacking = [name for name, about in properties.items() if not about.get("optional") and name not in value]
    return f"{where}: lacks {', '.join(lacking)}" if lacking else None


def _wrong_property_string(text: str, form: Mapping[str, Any], where: str) -> str | None:
    default = next((name for name, about in form.items() if about.get("default_key")), None)
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name, value = (name, value) if equals else (str(default), name)
        about = form.get(name)
        if about is None:
            return f"{where}: {name!r} is not known"
        about = form.get(about["alias"], {}) if "alias" in about else about
        if why := _wrong_text(value, about):
            return f"{where}: {name}={value}: {why}"
    return None
