"""Ids for the members of one wave, made from the names of their VMs."""

import re
from collections import Counter
from collections.abc import Iterable

LONGEST = 64
# «-10000» comes after the ids that are alike.
_NUMBER_LONGEST = 6
NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")


class MemberIds:
    """Gives no id twice."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        # By the plain id: the last number that was tried. A fleet may be named in letters of which an id can have none.
        self._last: Counter[str] = Counter()

    def take(self, id_: str) -> None:
        """An id that a member has already."""
        self._taken.add(id_)

    def fresh(self, name: str) -> str:
        """A valid id for the VM with this name; with a number from 2 on, if another member has it."""
        plain = id_ = NOT_IN_IDS.sub("-", name).lstrip("._-")[: LONGEST - _NUMBER_LONGEST] or "vm"
        while id_ in self._taken:
            self._last[plain] = max(self._last[plain], 1) + 1
            id_ = f"{plain}-{self._last[plain]}"
        self._taken.add(id_)
        return id_


def ids(names: Iterable[str]) -> list[str]:
    """An id for each of the members, none of which has one yet."""
    made = MemberIds()
    return [made.fresh(name) for name in names]
