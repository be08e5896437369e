"""Whether the moved guest is the one that ran at its source. Checked after its first boot; the result is kept with the job.
asyncio.

    before the source is shut down   the platform is asked what runs in the guest, and that is noted
    after the first boot here        the guest's agent is asked, and both are compared (`proof/sameness.py`)

No failure of this fails a job, and it is no part of the outage: the source runs while its platform is asked, and the guest runs
here while its agent is asked.
"""

import asyncio
import time
from uuid import UUID

import structlog

from synvirt.errors import Cancelled, NotFound, PersistFailed, SynvirtError
from synvirt.live import ReportsGuestFacts
from synvirt.migrations.job import Job
from synvirt.migrations.landing import machine_of
from synvirt.migrations.memory import SourceMemory, noting
from synvirt.model.facts import bounded
from synvirt.model.job import Moved
from synvirt.model.rehearsal import Sameness
from synvirt.model.values import now
from synvirt.proof.sameness import compared, is_settled

log = structlog.get_logger(__name__)

# A platform answers in seconds. A cut-over does not wait longer for the comparison.
SOURCE_WITHIN_S = 30.0
# Services start within a minute after the first sign of life. What has not started by then counts as missing.
SETTLED_WITHIN_S, LOOK_AGAIN_S = 60.0, 3.0
# The most differences that are kept, as they are in every answer about the job. A guest with more is another guest.
DIFFER_MAX = 100


async def ask_source(job: Job) -> None:
    """Notes the facts of the guest, while it still runs at its source."""
    if job.migration.plan.source.Live is None:
        return
    try:
        async with asyncio.timeout(SOURCE_WITHIN_S):
            found = await job.with_adapter(
                lambda adapter: adapter.guest_facts(job.vm_id) if isinstance(adapter, ReportsGuestFacts) else _nothing()
            )
    except (Cancelled, PersistFailed):
        raise
    except (SynvirtError, TimeoutError) as error:
        log.warning("the source does not say what runs in its guest", job=str(job.id), cause=str(error))
        return
    if found:  # a guest that is off already gives no facts; the earlier note stays
        memory = job.rooms.store.memory
        await job.in_thread(memory.change, job.id, SourceMemory, lambda before: noting(before, facts=bounded(found)))


async def _nothing() -> dict[str, str]:
    return {}


async def compare(job: Job) -> None:
    """Compares once. It asks the guest again while something is missing that guests start late."""
    if job.migration.moved is not None or job.migration.domain is None:
        return
    until = time.monotonic() + SETTLED_WITHIN_S
    while True:
        is_over = time.monotonic() >= until
        try:
            rows = await job.in_thread(_rows, job)
            if is_over or is_settled(rows):
                break
        except (Cancelled, PersistFailed):
            raise
        except SynvirtError as error:  # a busy libvirt may answer the next time
            if is_over or isinstance(error, NotFound):
                log.warning("the moved guest cannot be compared", job=str(job.id), cause=error.detail)
                return
        await job.stop.sleep(LOOK_AGAIN_S)
    differ = [one for one in rows if one.grade != "same"]
    await job.change(moved=Moved(at=now(), same=len(rows) - len(differ), differ=tuple(differ[:DIFFER_MAX])))


def _rows(job: Job) -> tuple[Sameness, ...]:
    hypervisor, domain, machine = job.rooms.hypervisor, job.migration.domain, machine_of(job.migration)
    assert domain is not None
    plan = job.migration.plan
    source = job.rooms.store.memory.get(job.id, SourceMemory).facts
    here = hypervisor.guest_facts(UUID(domain.uuid)) if source and plan.target.start else {}
    # An imported file has no facts about a running guest.
    from_platform = plan.source.Live is not None
    return compared(source, here, domain.differences, hypervisor.machine_facts(machine), is_expected=from_platform)
