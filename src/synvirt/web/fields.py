"""The fields of a form, from the API's model: a new field of a platform is on its page without a line here.

    model ─▶ its JSON Schema ─▶ fields, each with what was typed ─▶ fields.html
    Form ─▶ the same fields ─▶ values, for the model to judge

A secret is never written into a page, not even for the person who typed it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from synvirt.errors import BadRequest, Conflict, SynvirtError
from synvirt.live.form import pairs
from synvirt.web.forms import Form
from synvirt.web.words import MISTAKES

# Longer texts have lines: a certificate, the lines of a known_hosts file.
LONG_CHARS = 32_768
LABELS = {
    "endpoint": "Address",
    "verify_tls": "Its certificate must be signed by an authority that this host trusts",
    "fingerprint_sha256": "Pinned certificate (SHA-256)",
    "ca_certificate": "Authority's certificate",
    "vm_ids": "Guests",
    "path": "Folder",
    "keep_last": "Newest",
    "keep_hourly": "Hours",
    "keep_daily": "Days",
    "keep_weekly": "Weeks",
    "keep_monthly": "Months",
    "keep_yearly": "Years",
    "node_hosts": "SSH addresses of the nodes (NODE=ADDRESS, one per line)",
    "quiesce": "Freeze file systems",
    "timezone": "Time zone",
    "rrule": "Opens again by (RFC 5545)",
    "start": "Opens",
    "end": "Closes",
    "lockouts": "Lock-outs (START END, one per line)",
}
_CAPITALS = {"nbd", "tls", "vddk", "id", "url", "vm", "sha256"}
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_bps": "bytes per second"}

# Plain texts in the API, but never written into a page.
_SECRETS = {"recovery_key"}

# The descriptions of values with a format.
_FORMS = {
    "path": "is not an absolute path: /srv/backups, for example",
    "scratch_dir": "is not an absolute path",
    "vddk_libdir": "is not an absolute path",
    "fingerprint_sha256": "is not a SHA-256: 32 bytes in hex",
    "name": "has a character that a name cannot have",
    "id": "is not an id: up to 64 letters, digits, dots, hyphens and underscores, of which the first is a letter or a digit",
    "endpoint": "has a character that an address cannot have",
}
# A person corrects one mistake at a time; each is shown at its field, too.
MISTAKES_SHOWN = 5

M = TypeVar("M", bound=BaseModel)
Look = Literal["text", "long", "secret", "long secret", "number", "numbers", "lines", "pairs", "check", "choice"]


@dataclass(frozen=True, slots=True)
class Field:
    """`name`: in the form; `key`: in the model. `value`: the initial value. `mistake`: what is wrong with it."""

    name: str
    key: str
    label: str
    look: Look
    required: bool
    value: str = ""
    choices: tuple[str, ...] = ()
    mistake: str = ""

    @property
    def id(self) -> str:
        return f"field-{self.name.replace('.', '-')}"


def fields(model: type[BaseModel], prefix: str = "", values: Mapping[str, Any] | None = None) -> list[Field]:
    """The fields of `model` with one input each; `values` (of the model's types) replace its defaults."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        _field(key, {**_alternative(one), "default": (values or {}).get(key, one.get("default"))}, prefix, key in required)
        for key, one in schema.get("properties", {}).items()
        if "$ref" not in _alternative(one) and (_alternative(one).get("type") != "object" or _are_pairs(_alternative(one)))
    ]


def typed(known: Iterable[Field], form: Form, error: SynvirtError | None = None) -> list[Field]:
    """The same fields with what was typed into them, except secrets, and with the mistakes."""
    mistakes = error.mistakes if isinstance(error, Mistaken) else {}
    return [
        replace(
            one,
            value=one.value if "secret" in one.look else _shown(one, form),
            mistake=mistakes.get(one.name, mistakes.get(one.key, "")),
        )
        for one in known
    ]


def mark_of(known: Iterable[Field]) -> str:
    """A digest of what a form shows, for its hidden field `shown`."""
    return hashlib.sha256(json.dumps([(one.name, one.value) for one in known]).encode()).hexdigest()


def refuse_overtaken(known: Iterable[Field], form: Form, refused: type[Conflict] = Conflict) -> None:
    """Conflict, where somebody else has changed since what the form showed when it was opened. `known`: as it is now."""
    present = list(known)
    if form.text("shown") in ("", mark_of(present)):
        return
    others = [one for one in present if "secret" not in one.look and one.value.split() != _shown(one, form).split()]
    raise refused(
        "it was changed since this form was opened; now there is "
        + ("what you typed" if not others else "; ".join(f"{one.label}: {one.value or '(empty)'}" for one in others)),
        hint="compare the two; to save replaces it by what is typed here",
    )


def values(known: Iterable[Field], form: Form) -> dict[str, Any]:
    """The values by the model's names, without empty ones. An invalid number stays as it was typed: the model reports it."""
    found = {one.key: _value(one, form) for one in known}
    return {key: value for key, value in found.items() if value is not None}


class Mistaken(BadRequest):
    """The input is invalid. `mistakes`: what is wrong, by the field's name; the detail has the first of them."""

    def __init__(self, mistakes: Mapping[str, str]) -> None:
        self.mistakes = mistakes
        first = list(mistakes.items())[:MISTAKES_SHOWN]
        super().__init__("; ".join(f"{_named(name)}: {words}" for name, words in first))


def judged(model: type[M], found: Mapping[str, Any], prefix: str = "") -> M:
    """Checks the values like the API; Mistaken. `prefix`: of the form's names."""
    try:
        return model.model_validate(found)
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])), one) for one in error.errors(include_url=False, include_input=False)]
        raise Mistaken({prefix + place: _mistake(place, one) for place, one in places}) from None


def _named(name: str) -> str:
    key = name.rpartition(".")[2]
    return label(key) if key else "All of it"


def _mistake(place: str, one: ErrorDetails) -> str:
    key, kind = place.rpartition(".")[2], one["type"]
    if kind == "string_pattern_mismatch":
        return _FORMS.get(key, "has a character that it cannot have")
    if kind == "missing":
        return "is required"
    words = MISTAKES.get(kind)
    return words.format_map(one.get("ctx", {})) if words else one["msg"].removeprefix("Value error, ")


def explained(model: type[BaseModel]) -> str:
    """The model's description, with the labels instead of its fields' names."""
    text = " ".join((model.__doc__ or "").split())
    names = {one.key: f"“{one.label}”" for one in fields(model)}
    return re.sub(r"`([^`]*)`", lambda match: names.get(match[1], match[1]), text)


def _field(key: str, schema: Mapping[str, Any], prefix: str, required: bool) -> Field:
    choices = tuple(str(choice) for choice in schema.get("enum", [schema["const"]] if "const" in schema else ()))
    default = schema.get("default")
    if isinstance(default, Mapping):
        default = [f"{name}={value}" for name, value in default.items()]
    if isinstance(default, list | tuple):
        default = ("\n" if _look(key, schema) in ("lines", "pairs") else ", ").join(map(str, default))
    if default is None or default is False or schema.get("writeOnly"):
        default = ""
    value = "yes" if default is True else str(default)
    return Field(prefix + key, key, label(key), _look(key, schema), required, value, choices)


def _look(key: str, schema: Mapping[str, Any]) -> Look:
    if "enum" in schema or "const" in schema:
        return "choice"
    kind = schema.get("type")
    if kind == "object":
        return "pairs"
    if kind == "array":
        return "numbers" if "prefixItems" in schema else "lines"
    if kind != "string":
        return "check" if kind == "boolean" else "number"
    if key in _SECRETS or schema.get("format") == "password":
        return "long secret" if key.endswith("private_key") or key == "client_key" else "secret"  # these have lines
    return "long" if schema.get("maxLength", 0) >= LONG_CHARS else "text"


def _are_pairs(schema: Mapping[str, Any]) -> bool:
    """Texts by name without secrets: lines of NAME=VALUE can hold them."""
    value = schema.get("additionalProperties")
    return isinstance(value, Mapping) and value.get("type") == "string" and not value.get("writeOnly")


def _alternative(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The other type of a value that may be null."""
    return next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)


def label(key: str) -> str:
    """`shutdown_timeout_s` is the Shutdown timeout (seconds)."""
    if key in LABELS:
        return LABELS[key]
    unit = next((words for suffix, words in _UNITS.items() if key.endswith(suffix)), "")
    key = key.removesuffix(next((suffix for suffix in _UNITS if key.endswith(suffix)), ""))
    words = [word.upper() if word in _CAPITALS else word for word in key.split("_")]
    text = " ".join(words)
    return text[:1].upper() + text[1:] + (f" ({unit})" if unit else "")


def _shown(one: Field, form: Form) -> str:
    return "yes" if one.look == "check" and form.many(one.name) else form.text(one.name) if one.look != "check" else ""


def _value(one: Field, form: Form) -> Any:
    text = next(iter(form.many(one.name)), "").replace("\r\n", "\n")
    if one.look == "check":
        return bool(text)
    if one.look != "secret":  # a password may begin with a space
        text = text.strip()
    return _READ[one.look](text) if text else None


def _number(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


_READ: Mapping[Look, Callable[[str], Any]] = {
    "text": str,
    "choice": str,
    "secret": str,
    # PEM and known_hosts end with a line feed, which a text box loses.
    "long": lambda text: text + "\n",
    "long secret": lambda text: text + "\n",
    "number": _number,
    "numbers": lambda text: [_number(part) for part in re.split(r"[\s,;-]+", text)],
    "lines": lambda text: [line.strip() for line in text.splitlines() if line.strip()],
    "pairs": lambda text: pairs(text.splitlines()),
}
