"""Stored documents, read leniently: what another version of the service has written does not stop this one, and is not lost.

A column has each document's version, MAJOR.MINOR: lists give documents out as they are stored. The minor number grows when a
field is added. A field that this version does not know is left out when the document is read, and put back when it is written.
The major number grows when an earlier version would read a document wrongly. A document of another major number, or one that
cannot be read, is Unreadable: it is quarantined, which means left as it is, and the doctor shows it.

Who submitted a document is stored twice: `submitted_by` is the account alone, which is all that earlier versions can read, and
`submitter` is the whole Submitter (docs/decisions/0021). Answers have the whole as `submitted_by`: `as_answered`.
"""

import json
import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar, cast

import structlog
from pydantic import BaseModel, ValidationError
from sqlalchemy import ColumnElement

from synvirt.errors import Internal
from synvirt.model.submitter import Submitter

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=BaseModel)

MAJOR, MINOR = 1, 2
VERSION = f"{MAJOR}.{MINOR}"

# So many texts that were read lately, and that were written lately, are known; longer ones are not. Some MiB in all.
LATELY, CHARS_LATELY = 64, 2**15
# How often unknown fields are taken out. After one is out, another may show in a part that could not be checked before.
ROUNDS = 5
# The fields that identify an item of a list whose items come and go.
_NAMES = ("key", "number", "at")
# In a document: quotes inside texts are escaped, so no text contains one of these.
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_ACCOUNT = re.compile(rf'"submitted_by":({_TEXT})')
_WHOLE = rf'"submitter":(\{{(?:{_TEXT}|[^"{{}}])*\}})'
# An earlier version that wrote the document again has put what it did not know before the rest.
_SUBMITTER = re.compile(rf"(?:,{_WHOLE}|{_WHOLE},)")
# These have no field that this version does not know. To add one and to look for one are single steps of the interpreter, so
# threads share it.
_written_lately: deque[tuple[type[BaseModel], str]] = deque(maxlen=LATELY)


class Unreadable(Internal):
    """A stored document that this version cannot read."""


def is_known(version: ColumnElement[str]) -> ColumnElement[bool]:
    """A condition for queries: the document has a version that this one can read."""
    return version.like(f"{MAJOR}.%")


def version_after(before: str) -> str:
    """The version of a document after this version has written it. A later minor version stays, as its fields are kept."""
    minor = before.partition(".")[2]
    return f"{MAJOR}.{max(MINOR, int(minor) if minor.isascii() and minor.isdigit() else 0)}"


def check_version(what: str, version: str) -> None:
    """Unreadable, where this version of the service cannot read the document's version."""
    if version.partition(".")[0] != str(MAJOR):
        raise Unreadable(f"a stored {what} is of version {version}, and this service knows {VERSION}", hint=_HINT)


def written(document: BaseModel) -> str:
    """The document as it is stored."""
    text = _written(document)
    if len(text) <= CHARS_LATELY:
        _written_lately.append((type(document), text))
    return text


def _written(document: BaseModel) -> str:
    text, who = document.model_dump_json(), getattr(document, "submitted_by", None)
    if not isinstance(who, Submitter):
        return text
    whole, account = who.model_dump_json(), json.dumps(who.account, ensure_ascii=False)
    text = text.replace(f'"submitted_by":{whole}', f'"submitted_by":{account}', 1)
    return text if who == Submitter(account=who.account) else f'{text[:-1]},"submitter":{whole}}}'


def as_answered(text: str) -> str:
    """A stored document as the API answers it. It is not parsed: there may be thousands. Both keys are near its end, where
    `rfind` finds them 10 times as fast as a search from the start."""
    found = _last(_SUBMITTER, '"submitter":', text)
    bare = text if found is None else text[: found.start()] + text[found.end() :]
    account = _last(_ACCOUNT, '"submitted_by":', bare)
    if account is None:
        return text
    whole = Submitter(account=json.loads(account[1])).model_dump_json() if found is None else found[1] or found[2]
    return f'{bare[: account.start()]}"submitted_by":{whole}{bare[account.end() :]}'


def _last(pattern: re.Pattern[str], key: str, text: str) -> re.Match[str] | None:
    """The pattern where the text has the key for the last time. A comma may be before the key."""
    at = text.rfind(key)
    return pattern.search(text, at - 1) if at > 0 else None


def parsed(model: type[M], text: str, version: str = VERSION) -> M:
    """The model in a document. Unreadable."""
    check_version(model.__name__, version)
    try:
        return cast("M", _lately(model, text)) if len(text) <= CHARS_LATELY else model.model_validate_json(text)
    except ValidationError as first:
        error = first
    try:
        data = json.loads(text)
    except ValueError as broken:
        raise Unreadable(f"a stored {model.__name__} is not JSON: {broken}", hint=_HINT) from None
    for _ in range(ROUNDS):
        wrong = error.errors(include_url=False, include_input=False)
        unknown = [one["loc"] for one in wrong if one["type"] == "extra_forbidden"]
        if not unknown:
            break
        for place in unknown:
            _take_out(data, place)
        try:
            return model.model_validate_json(json.dumps(data))
        except ValidationError as again:
            error = again
    first_wrong = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first_wrong["loc"])
    raise Unreadable(f"a stored {model.__name__} cannot be read: {where}: {first_wrong['msg']}", hint=_HINT)


@lru_cache(LATELY)
def _lately(model: type[BaseModel], text: str) -> BaseModel:
    """A job's document is read several times until it changes, and to parse it takes longer than to ask the database for it.
    Documents are frozen, so one serves all its readers."""
    return model.model_validate_json(text)


def readable(model: type[M], texts: Iterable[str]) -> list[M]:
    """The models of all documents that can be read. A bad row stops nothing, and is left as it is."""
    found = []
    for text in texts:
        try:
            found.append(parsed(model, text))
        except Unreadable as error:
            log.warning("a stored document is left alone", cause=error.detail)
    return found


def rewritten(before: str, known: BaseModel, after: BaseModel) -> str:
    """`after` as JSON, with the fields of `before` that this version does not know. `known`: what it has read of `before`."""
    is_ours, new = (type(known), before) in _written_lately, written(after)
    if is_ours or before == (as_known := _written(known)):  # this version wrote it, as nearly always: nothing to look for
        return new
    old, seen = json.loads(before), json.loads(as_known)
    if not _has_more(old, seen):
        return new
    return json.dumps(_with_unknown(old, seen, json.loads(new)), ensure_ascii=False, separators=(",", ":"))


_HINT = "a later version of the service may have written it; `synvirt doctor` names it"


def _take_out(data: Any, place: tuple[int | str, ...]) -> None:
    """Takes a field out. `place` is pydantic's: besides keys and indexes it has the tags of unions, which are no keys."""
    for step in place[:-1]:
        if isinstance(data, dict):
            data = data.get(step, data)
        elif isinstance(data, list) and isinstance(step, int):
            data = data[step]
    if isinstance(data, dict):
        data.pop(place[-1], None)


def _has_more(old: Any, seen: Any) -> bool:
    if isinstance(old, dict) and isinstance(seen, dict):
        return any(key not in seen or _has_more(value, seen[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(seen, list):
        return any(_has_more(one, other) for one, other in zip(old, seen, strict=False))
    return False


def _with_unknown(old: Any, seen: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(seen, dict) and isinstance(new, dict):
        more = {key: value for key, value in old.items() if key not in seen}
        kept = {key: _with_unknown(old[key], seen[key], new[key]) if key in old and key in seen else new[key] for key in new}
        return kept | more
    if isinstance(old, list) and isinstance(seen, list) and isinstance(new, list) and len(old) == len(seen):
        if name := _name_of(seen + new):
            by_name = {one[name]: place for place, one in enumerate(seen)}
            return [
                _with_unknown(old[by_name[one[name]]], seen[by_name[one[name]]], one) if one[name] in by_name else one
                for one in new
            ]
        if len(old) == len(new):
            return [_with_unknown(*three) for three in zip(old, seen, new, strict=True)]
    return new


def _name_of(items: list[Any]) -> str | None:
    return next((name for name in _NAMES if items and all(isinstance(one, dict) and name in one for one in items)), None)
