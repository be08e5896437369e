"""Answers of another form: each place of a right answer, with each thing that JSON can hold instead."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from synvirt.errors import SynvirtError

# Text of so many digits is no number that Python takes; a name of that length is longer than any of ours.
ODD: tuple[Any, ...] = (
    *(None, True, 7, -1, 1 << 70, 1.5, float("inf"), "", "text", "\x00\n", "9" * 5000),
    *([], [7], [None], [[]], [{}], {}, {"a": 7}, {"a": {"b": []}}),
)
# Of a list its first things stand for all.
_ITEMS_MAX = 2


def paths(answer: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in an answer, itself included."""
    yield at
    inside: Any = (
        answer.items() if isinstance(answer, dict) else enumerate(answer[:_ITEMS_MAX]) if isinstance(answer, list) else ()
    )
    for key, value in list(inside):
        yield from paths(value, (*at, key))


def variants(answer: Any) -> Iterator[tuple[str, Any]]:
    """The answer with one thing in it replaced or left out, and which."""
    for path in paths(answer):
        for odd in ODD:
            yield f"{path}: {str(odd)[:20]!r}", _with(answer, path, odd)
        if path and isinstance(path[-1], str):
            left_out = copy.deepcopy(answer)
            del _at(left_out, path[:-1])[path[-1]]
            yield f"{path}: left out", left_out


def at_most_ours(which: str, use: Callable[[], object]) -> None:
    """The use of an answer ends, or raises an error of ours."""
    try:
        with suppress(SynvirtError):
            use()
    except Exception as error:
        error.add_note(which)
        raise


def _at(answer: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        answer = answer[key]
    return answer


def _with(answer: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return copy.deepcopy(odd)
    changed = copy.deepcopy(answer)
    _at(changed, path[:-1])[path[-1]] = copy.deepcopy(odd)
    return changed
