"""Where the guest is that a job's source no longer has: it was live-migrated to the host of another source. asyncio.

    the job's error ─▶ the other sources of its kind are asked for that VM ─▶ it is on there: the error's hint names the source

A job never goes on from another source: whether that is its guest, and not a copy of it, a person decides.
"""

import asyncio
from typing import Final

import structlog

from synvirt.errors import SynvirtError, VmNotFound
from synvirt.live import GuestElsewhere
from synvirt.live.registry import BY_KIND
from synvirt.migrations.job import Job
from synvirt.model.sources import Source

log = structlog.get_logger(__name__)

# The job has failed, and its owner waits for the reason.
WITHIN_S: Final = 10.0
ASKED_MOST: Final = 32
_LISTED_MOST: Final = 1000

# Questions that nobody waits for any more: an event loop alone would forget them.
_left: set[asyncio.Task[bool]] = set()


async def name_new_source(job: Job, error: SynvirtError) -> None:
    """Names in the hint of the job's error the other source on which its guest runs now, if there is one. Never raises."""
    kind = job.migration.plan.source.Live
    if not isinstance(error, VmNotFound | GuestElsewhere) or kind is None or not BY_KIND[kind].ids_stay:
        return
    try:
        names = await job.stop.or_stop(_found(job))
    except Exception as failed:  # the job's own error is the one to show; here also Cancelled
        log.warning("the other sources are not asked", job=str(job.id), cause=str(failed))
        return
    if names:
        error.hint = f"it runs on source {' and on source '.join(names)} now: submit it from there"


async def _found(job: Job) -> list[str]:
    asked = {asyncio.create_task(_runs_there(job, source)): source.name for source in await job.in_thread(_others, job)}
    if not asked:
        return []
    try:
        done, _ = await asyncio.wait(asked, timeout=WITHIN_S)
        return sorted(asked[one] for one in done if one.exception() is None and one.result())
    finally:
        for one in asked:
            if not one.done():
                one.cancel()
                _left.add(one)
                one.add_done_callback(_let_go)


def _let_go(asked: "asyncio.Task[bool]") -> None:
    _left.discard(asked)
    if not asked.cancelled():
        asked.exception()  # or asyncio logs that nobody looked at it


def _others(job: Job) -> list[Source]:
    """Those that are asked. A login that has failed is not tried again: the platform may lock the account. Blocks."""
    plan = job.migration.plan
    assert plan.source_ref.kind == "live_vm"
    sources, _ = job.rooms.store.sources.page(limit=_LISTED_MOST)
    found = [one for one in sources if one.kind is plan.source.Live and one.id != plan.source_ref.source_id]
    return [one for one in found if one.last_test is None or one.last_test.ok][:ASKED_MOST]


async def _runs_there(job: Job, source: Source) -> bool:
    ref = job.migration.plan.source_ref
    assert ref.kind == "live_vm"
    async with job.rooms.sessions.lent(source.kind, source.id, within_s=WITHIN_S) as adapter:
        return (await adapter.inspect(ref.vm_id)).power_state == "on"
