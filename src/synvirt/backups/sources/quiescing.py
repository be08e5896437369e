"""The moment of a running guest's disks, as the job wants it: frozen by the agent, or not, and the run's warnings about it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from synvirt.backups.sources.guest import Ask, Consistency
from synvirt.errors import QuiesceFailed
from synvirt.kvm.freezing import still


@dataclass
class Moment:
    """Complete once the block has ended. `quiesced`: the guest froze, it thawed, and it was frozen all the while."""

    consistency: Consistency = "crash"
    quiesced: bool = False
    freeze_ms: int | None = None


@contextlib.contextmanager
def held(uri: str, domain: Any, ask: Ask) -> Iterator[Moment]:
    """QuiesceFailed, if a freeze is required and not possible; GuestStillFrozen."""
    moment = Moment()
    if ask.quiesce == "off":
        ask.move("snapshotting")
        yield moment
        return
    ask.move("quiescing")
    with still(uri, domain, before=lambda: ask.move("snapshotting")) as found:
        if ask.quiesce == "require" and found.why_not:
            raise _failed(domain, found.why_not)
        yield moment
    moment.freeze_ms = found.freeze_ms
    if found.quiesced:
        moment.quiesced, moment.consistency = True, "application" if found.by_applications else "filesystem"
    elif ask.quiesce == "require":
        raise _failed(domain, found.why_not)
    else:
        ask.warn(QuiesceFailed.code, f"{domain.name()} was not quiesced: {found.why_not}")


def _failed(domain: Any, why_not: str) -> QuiesceFailed:
    return QuiesceFailed(
        f"{domain.name()} cannot be quiesced: {why_not}",
        hint="install qemu-guest-agent in it, or set the job's quiesce to try",
    )
