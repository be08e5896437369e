"""Finds the existing name that is most like an unknown one, for hints; and names that differ only in their spelling."""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

# The most names of a list that are compared.
LOOKED_AT_MAX = 10_000
# NAME_MAX: a longer name is a mistake of another kind.
NAME_CHARS_MAX = 255
# The hint for a name that is there, and is not found all the same.
LEADS_NOWHERE = "the name is there: it is a link, and what it leads to is missing"

# The most names that a message lists.
LISTED_MAX = 20


def most_like(name: str, names: Iterable[str]) -> str | None:
    """The name in `names` that is most like `name`; None, if none is like it."""
    import difflib

    if len(name) > NAME_CHARS_MAX:
        return None
    return next(iter(difflib.get_close_matches(name, list(itertools.islice(names, LOOKED_AT_MAX)), n=1)), None)


def folded(name: str) -> str:
    """The same text for all spellings of a name that Windows and macOS take for one: capitals, and accents as letters of their
    own, make no difference there."""
    import unicodedata

    return unicodedata.normalize("NFC", name).lower()


def by_folded(names: Iterable[str]) -> dict[str, str | None]:
    """Each name by its folded text; None, where several names have it: then nobody knows which is meant."""
    found: dict[str, str | None] = {}
    for name in names:
        text = folded(name)
        found[text] = None if text in found else name
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """A hint with the most similar name; None, if none is like it."""
    near = most_like(name, names)
    return None if near is None else f"did you mean {near}?"


def listed(names: Sequence[str]) -> str | None:
    """A hint with the first names that there are; None, if there are none: then the detail says enough."""
    return f"there is {in_short(names)}" if names else None


def in_short(names: Sequence[str], *, between: str = ", ") -> str:
    """The first names of a list that may be long, and how many more there are."""
    more = [f"and {len(names) - LISTED_MAX} more"] if len(names) > LISTED_MAX else []
    return between.join([*names[:LISTED_MAX], *more])


def did_you_mean_file(path: Path, *folders: Path) -> str | None:
    """The same for the files in `folders`, or, without folders, for the files in its own folder. If its folder does not exist
    either, the hint is about the folder's name."""
    if not folders:
        for folder in reversed(path.parents):
            if not folder.exists():
                return did_you_mean_file(folder, folder.parent)
    names: list[str] = []
    for folder in dict.fromkeys(folders or (path.parent,)):
        with contextlib.suppress(OSError):
            names += (one.name for one in folder.iterdir())
    near = most_like(path.name, names)
    if near == path.name and path.parent in (folders or (path.parent,)):
        return LEADS_NOWHERE
    return None if near is None else f"did you mean {path.parent / near}?"


def hint_for(path: Path, error: OSError) -> str | None:
    """A hint for a file that could not be opened."""
    return did_you_mean_file(path) if isinstance(error, FileNotFoundError) else None


def none_of(word: str, words: Sequence[str], *, typed: str | None = None) -> str:
    """Says that `word` is none of `words`, and which of them was meant. `typed`: another word for it, which is shown."""
    near = did_you_mean(word.lower(), words)
    return f"{typed or word} is none of {', '.join(words)}" + (f"; {near}" if near else "")
