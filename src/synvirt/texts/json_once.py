"""JSON in which no object has a name twice: parsers take one of the two, and not all of them the same (RFC 8259 section 4)."""

import json
from collections import Counter
from typing import Any, Final

# The hint of an error about it.
ONE_COUNTS: Final = "give it once: it is not known which one counts"


class Doubled(ValueError):
    """An object has this name twice."""


def loads_once(content: bytes | str) -> Any:
    """What `json.loads` gives. Doubled; ValueError and RecursionError, as there."""
    return json.loads(content, object_pairs_hook=_once)


def refuse_doubled(content: bytes) -> None:
    """Doubled, where a name is given twice in content that is known to be JSON. Numbers stay texts: long ones take long."""
    json.loads(content, object_pairs_hook=_once, parse_int=str, parse_float=str)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Doubled(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return found
