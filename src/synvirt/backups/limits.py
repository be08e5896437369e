"""How many runs of all hosts copy at the same time: slots, as for migrations (jobs/slots.py).

    backup          its repository, the guests of this host     from before a guest is held until it is stored
    verification    its repository                              while the worker reads
    collection      its repository                              while the worker moves and removes
    restore         its repository, and what it writes to       for each disk
    boot test       its repository                              while its disks are served

A slot is never held during a wait: a run waits for it before it holds a guest's disks, and leaves it before the next guest.
Restores, boot tests and the collection at a backup's end get their slots at once, and count for later runs: a person, or a
backup whose points exist already, waits for them.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from synvirt.backups.under_way import UnderWay
from synvirt.destinations import Destination
from synvirt.jobs import slots
from synvirt.jobs.slots import Resource, Slots, destination, guests_of
from synvirt.repository.repository import Repository

URGENT = frozenset({"restore", "boot_test"})


@dataclass(frozen=True)
class Limits:
    """`host`: ours. The numbers: the most runs at once of one repository, of one host's guests, and jobs of one destination."""

    slots: Slots
    host: str
    per_repository: int
    per_host: int
    per_destination: int

    def guests(self) -> Resource:
        return guests_of(self.host, most=self.per_host)

    def destination(self, name: str, chosen: Destination) -> Resource:
        return destination(chosen.shared_id() or f"{self.host} {name}", most=self.per_destination)


# The slots that a run needs besides its repository's.
Needs = Callable[[Limits], Resource]


def held(
    limits: Limits | None, under_way: UnderWay, repository: Repository, *needs: Needs, urgent: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Holds slots of the repository and of all else that is needed, within the block. Cancelled, if that is requested while the
    run waits. None: there are no limits. `urgent`: it does not wait, as no run of an urgent kind does."""
    if limits is None:
        return contextlib.nullcontext()
    # The id in the repository's header, as each host registers a repository with an id of its own.
    resources = [slots.repository(repository.id, most=limits.per_repository), *(need(limits) for need in needs)]
    run = under_way.run
    return limits.slots.held_in_thread(run.id, resources, under_way.stop, urgent=urgent or run.kind in URGENT)
