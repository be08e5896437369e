"""Guests that are rehearsed together: they share one network, as long as one of them is in it. Thread-safe, blocking.

ask ─▶ a rehearsal each, which names them all in order
start: each once the one before it has booted          end: none goes before all have been checked
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from synvirt.errors import NotFound
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import Rehearsal, RehearsalState, Together
from synvirt.rehearsals.network import Bubble, Place
from synvirt.store import Store

# From these states on, the other guests can use it.
BOOTED = frozenset({RehearsalState.CHECKING})
OVER = frozenset({RehearsalState.SWEEPING, RehearsalState.PASSED, RehearsalState.FAILED, RehearsalState.CANCELLED})


@dataclass
class _Shared:
    bubble: Bubble
    # The number of cards of each guest in the group: so removing a job meanwhile gives no guest another's cards.
    cards: list[int]
    users: set[UUID] = field(default_factory=set)


class Networks:
    """`begin`: makes a network for these cards. It may raise HostLacks."""

    def __init__(self, begin: Callable[[Sequence[Nic]], Bubble]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._shared: dict[UUID, _Shared] = {}

    def join(self, rehearsal: Rehearsal, cards: Sequence[Sequence[Nic]]) -> Place:
        """Joins the group's network. `cards`: of each guest of the group, in its order."""
        assert rehearsal.together is not None
        number = rehearsal.together.rehearsals.index(rehearsal.id)
        with self._lock:
            shared = self._shared.get(rehearsal.together.id)
            if shared is not None and shared.bubble.ended:  # the others find that out too, and come into the new one
                shared.bubble.close()
                shared = None
            if shared is None:
                bubble = self._begin([card for one in cards for card in one])
                shared = self._shared[rehearsal.together.id] = _Shared(bubble, [len(one) for one in cards])
            shared.users.add(rehearsal.id)
        first = sum(shared.cards[:number])
        return Place(shared.bubble, range(first, first + shared.cards[number]), partial(self.leave, rehearsal))

    def leave(self, rehearsal: Rehearsal) -> None:
        """The last guest that leaves ends the network."""
        if rehearsal.together is None:
            return
        with self._lock:
            shared = self._shared.get(rehearsal.together.id)
            if shared is not None:
                shared.users.discard(rehearsal.id)
                if not shared.users:
                    self._shared.pop(rehearsal.together.id).bubble.close()


def others(store: Store, rehearsal: Rehearsal) -> list[Rehearsal]:
    """The others of its group, in its order. Those that exist no more had ended."""
    found = []
    for one in () if rehearsal.together is None else rehearsal.together.rehearsals:
        try:
            found += [store.rehearsals.get(one)] if one != rehearsal.id else []
        except NotFound:
            continue
    return found


def is_its_turn(together: Together, rehearsal: Rehearsal, group: Sequence[Rehearsal]) -> bool:
    """Whether it may start: those before it have booted, or will not boot any more."""
    before = together.rehearsals[: together.rehearsals.index(rehearsal.id)]
    return all(one.state in BOOTED | OVER for one in group if one.id in before)


def are_all_checked(group: Sequence[Rehearsal]) -> bool:
    """Whether it may end: no other guest's check needs it any more."""
    return all(one.checked or one.state in OVER for one in group)
