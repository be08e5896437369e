"""A job that has come further than the store knows: the store was put back from a copy that is older than the job's guest.

The job makes its guest's domain in Starting, or before an instant start, and notes it in the ledger first. So a domain without
its entry was made after that copy. Its guest may run, and its volumes have what it wrote since: to copy again would overwrite
that, and to sweep would destroy it.
"""

from synvirt.errors import Conflict, SynvirtError
from synvirt.hypervisor.hardware import uuid_of
from synvirt.migrations.job import Job
from synvirt.migrations.landing import machine_of

# What is the guest's by now. Its source is off because the guest is here.
GUESTS = frozenset({"volume", "domain", "variables", "screenshot", "export", "source_power"})


async def refuse(job: Job) -> None:
    """Conflict, where the guest is here, and the store does not know it. HypervisorAway."""
    if await _is_further(job):
        raise Conflict(
            f"the guest {job.manifest.name} is defined on this host already, and the store does not know that: the store is "
            "older than the guest, as if it was put back from a copy",
            hint="nothing is copied; the guest and its volumes stay as they are: it needs this job no more",
        )


async def has_guest(job: Job) -> bool:
    """Whether that is so, for a job that ends. Where the hypervisor cannot be asked, what the store says counts."""
    try:
        return await _is_further(job)
    except SynvirtError:
        return False


async def _is_further(job: Job) -> bool:
    if job.migration.manifest is None or job.migration.repair is not None:
        return False  # it has made nothing, or makes no guest
    if any(entry.kind == "domain" for entry in await job.in_thread(job.rooms.store.ledger, job.id)):
        return False
    # Another domain of that UUID is no guest of the job: its name and ids are checked before it is defined.
    return await job.in_thread(job.rooms.hypervisor.job_of, uuid_of(machine_of(job.migration))) == str(job.id)
