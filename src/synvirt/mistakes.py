"""pydantic's errors in plain words. Its own messages show regular expressions and a programmer's terms."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from synvirt.nearest import did_you_mean
from synvirt.sizes import MIB, exact_size

# The formats that a request, a setting or a source's parameter may need: what a text of each format is.
FORMS: Mapping[str, str] = {
    r"^[\w.-]+$": "letters, digits, dot, hyphen and underscore alone",
    r"^[a-z][a-z0-9_-]{0,31}$": "a small letter, then up to 31 small letters, digits, hyphens and underscores",
    r"^[1-9][0-9]{0,18}$": "`next_cursor` as a page gave it",
    r"^[0-9a-fA-F]{64}$": "a SHA-256 of 64 hexadecimal digits",
    r"^([0-9A-Fa-f]{2}:){31}[0-9A-Fa-f]{2}$|^[0-9A-Fa-f]{64}$": "a SHA-256: 64 hexadecimal digits, with or without colons",
    r"^[\x21-\x7e]+$": "ASCII without spaces",
    r"^[^\x00-\x1f\x7f]*$": "one line without control characters",
    r"^[^\x00-\x20\x7f]+$": "one word without spaces and control characters",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "up to 64 letters, digits, dots, hyphens and underscores, a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, dots, hyphens and underscores, a letter or digit first",
    r"^[a-z0-9-]{1,64}$": "up to 64 small letters, digits and hyphens",
    r"^https?://": "a URL: https://host/…",
    r"^https?://[^/?#]": "a URL with a host: https://host/…",
    r"^(https?://[^\s@]+)?$": "a URL without a name and a password: https://host/…",
    r"^(https?://[^\s?#@]+)?$": "a URL without a name, a password and a query: https://host/…",
    r"^(https://[^\s?#@]+)?$": "an https:// URL without a name, a password and a query",
    r"^(([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2})?$": "a SHA-256: 64 hexadecimal digits, with or without colons",
    r"^[a-z_][a-z0-9_-]*$": "an account's name: small letters, digits, hyphens and underscores",
    r"^(https?|s3|smb)://[^\x00-\x1f\x7f]+$": "a URL: https://host/file, s3://bucket/key or smb://host/share/file",
    r"^/[^\x00]*$": "an absolute path: /srv/backups, for example",
    r"^/[^\x00-\x1f\x7f]*$": "an absolute path",
    r"^/[^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f]$": "an absolute path without a slash at its end",
    r"^(/[A-Za-z0-9._-]+)+$": "an absolute path of letters, digits, dots, hyphens and underscores",
    r"^[A-Za-z0-9.:_-]{1,253}$": "a host's name or address",
    r"^[A-Za-z0-9_\[:][A-Za-z0-9._:%\]-]*$": "a host's name or address",
    r"^iqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9.-]{1,100}(:[a-z0-9.:-]{1,100})?$": (
        "an initiator's name: iqn.2026-01.com.example:host, for example"
    ),
    r"^[a-z:]*$": "transports with colons between them: nbdssl:nbd, for example",
    r"^$|^(\\\\[^\\/?.*<>|\":\x00-\x1f][^\\/?*<>|\":\x00-\x1f]*|[A-Za-z]:)(\\[^\\/?*<>|\":\x00-\x1f]+)+\\?$": (
        r"a Windows folder, D:\exports or \\server\share\folder"
    ),
}
# A local time is refused with an offset, and any other without: which of them a field takes is not known here.
_TIME = "must be a time: 2026-11-28T22:00:00+01:00, for example, or without the offset where it is a local time"
_WORDS: Mapping[str, str] = {
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "tuple_type": "must be a list",
    "json_invalid": "is not JSON: {error}",
    "datetime_parsing": _TIME,
    "datetime_from_date_parsing": _TIME,
    "datetime_type": _TIME,
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "needs {discriminator}, which says what it is",
}
# «Input should be a valid integer», «List should have at least 1 item after validation, not 0».
_SUBJECT = re.compile(r"^[A-Z][a-z]+ should ")
_AFTERWARDS = re.compile(r" after validation, not \S+$")


# pydantic names the chosen branch of a union like a field, right behind the field or the item that has it: nobody wrote that.
BRANCHES: Mapping[str, frozenset[str]] = {
    "source_ref": frozenset({"live_vm", "offline_host_path", "upload", "remote_url"}),
    "checks": frozenset({"command", "port", "role", "http"}),
    "destinations": frozenset({"directory", "zfs", "rbd"}),
}
# The fields of these whose items each have the union.
_OF_ITEMS = ("checks", "destinations")

# The value must be one of several words.
_CHOICES = ("literal_error", "enum")
_LIMITS = ("ge", "gt", "le", "lt")

# The most mistakes that are listed at once.
_LISTED = 5


def listed(mistakes: Iterable[Mapping[str, Any]], what: str) -> str:
    """The first mistakes, each with its place within `what`."""
    return "; ".join(f"{place([what, *one['loc']])}: {worded(one)}" for one in islice(mistakes, _LISTED))


def worded(mistake: Mapping[str, Any]) -> str:
    """What is wrong, without the value and its place, from one of pydantic's `ErrorDetails`. With `input`, a wrong word is
    answered with the nearest of the allowed words."""
    kind, context = mistake["type"], mistake.get("ctx") or {}
    if kind == "string_pattern_mismatch":
        form = FORMS.get(context.get("pattern", ""))
        return f"must be {form}" if form else "is not of the form it must have"
    if kind in _WORDS:
        return _WORDS[kind].format_map({"error": ""} | context)
    message = _AFTERWARDS.sub("", _SUBJECT.sub("must ", str(mistake["msg"]).removeprefix("Value error, ")))
    limit = next((context[name] for name in _LIMITS if name in context), None)
    if isinstance(limit, int) and limit >= MIB and limit % MIB == 0:  # a size, which people do not write in bytes
        return f"{message} ({exact_size(limit)})"
    near = _meant(mistake.get("input"), message) if kind in _CHOICES else None
    return f"{message}; {near}" if near else message


def _meant(value: object, choices: str) -> str | None:
    return did_you_mean(value, re.findall("'([^']*)'", choices)) if isinstance(value, str) else None


def place(parts: Iterable[str | int]) -> str:
    """Where a mistake is: `target.network_map[0].source`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in written(parts)).removeprefix(".")


def written(parts: Iterable[str | int]) -> list[str | int]:
    """A mistake's place as it was written: without the branches of unions, and without what marks the key of a table."""
    given = [part for part in parts if part != "[key]"]
    return [part for index, part in enumerate(given) if not _is_branch(given, index)]


def _is_branch(parts: Sequence[str | int], index: int) -> bool:
    around = parts[max(index - 2, 0) : index]
    field = around[0] if len(around) == 2 and around[0] in _OF_ITEMS else around[-1] if around else None
    # A check's port is a field where checks are no union (those of waves), and a branch has a field behind it.
    is_field = field == "checks" and index == len(parts) - 1
    return isinstance(field, str) and parts[index] in BRANCHES.get(field, ()) and not is_field
