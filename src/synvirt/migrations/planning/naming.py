"""Names in a plan that must be known here."""

import difflib
from collections.abc import Iterable

from synvirt.errors import InvalidPlan


def refuse_unknown(name: str | None, known: Iterable[str], what: str) -> None:
    """InvalidPlan with the nearest name, unless the name is known."""
    names = list(known)
    if name is None or name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(names[:20]) or "none"
    hint = f"did you mean {near[0]}?" if near else f"there is {listed}"
    raise InvalidPlan(f"there is no {what} called {name!r}", hint=hint)
