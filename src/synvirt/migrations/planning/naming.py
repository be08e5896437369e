"""Names in a plan that must be known here."""

from collections.abc import Iterable

from synvirt.errors import InvalidPlan
from synvirt.nearest import did_you_mean, listed


def refuse_unknown(name: str | None, known: Iterable[str], what: str) -> None:
    """InvalidPlan with the nearest name, unless the name is known."""
    names = list(known)
    if name is None or name in names:
        return
    raise InvalidPlan(f"there is no {what} called {name!r}", hint=did_you_mean(name, names) or listed(names))
