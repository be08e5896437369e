"""The files that an Offline job reads: the importer, their place, and readers of their disks. asyncio."""

from pathlib import Path

from synvirt.disks.roots import Root
from synvirt.errors import InvalidPlan
from synvirt.migrations.job import Job
from synvirt.migrations.passes import PassDisk
from synvirt.offline import OfflineImporter
from synvirt.offline.elsewhere import joined
from synvirt.offline.several import choosing


def importer_of(job: Job) -> tuple[OfflineImporter, Path, Root]:
    """The importer of the job's files. Blocks: it asks the store for an upload's path and for the sealed secret."""
    plan = job.migration.plan
    if plan.source.Offline is None or plan.source_ref.kind == "live_vm":
        raise RuntimeError("a Live plan has no file")
    importer = job.rooms.importers.get(plan.source.Offline)
    if importer is None:
        raise InvalidPlan(f"offline kind {plan.source.Offline} is not served yet")
    ref = plan.source_ref
    if ref.kind == "remote_url":
        ref = joined(ref, job.rooms.secret_of(job.id))
    return choosing(importer, ref.vm), *job.rooms.place(ref)


async def disks_of_files(job: Job) -> list[PassDisk]:
    """The machine's disks, ready to be read. Cancelled."""
    importer, path, root = await job.in_thread(importer_of, job)

    def opened() -> list[PassDisk]:
        found = []
        with job.rooms.connected(root):
            for disk, volume in job.copied_disks:
                one = importer.open_disk(path, root, disk.key)
                found.append(PassDisk(disk.key, one.reader, volume, disk.capacity_bytes, one.checksums, still=True))
        return found

    return await job.stop.or_stop(job.in_thread(opened))
