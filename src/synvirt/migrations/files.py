"""The files that an Offline job reads: the importer, their place, readers of their disks, and whether they are still those
with which the copy began. asyncio.

`refuse_changed` looks at the files that the readers name, before each copy begins and after it. `hearing.py` looks at all that
a worker has opened, while it copies.
"""

import ast
from collections.abc import Collection
from pathlib import Path

from synvirt.disks.noted_files import NotedFile, local, names_of_changed, noted
from synvirt.disks.roots import Root
from synvirt.disks.specs import paths, versions
from synvirt.errors import DiskReadFailed, InvalidPlan
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


async def refuse_changed(job: Job, disks: list[PassDisk]) -> None:
    """DiskReadFailed, when a source file has changed since the copy began: two halves of two exports are no disk."""

    def look() -> dict[str, tuple[str, ...]]:
        return {disk.key: tuple(file.text for file in (*_as_they_are(disk), *versions(disk.reader))) for disk in disks}

    found = await job.in_thread(look)
    present = tuple(dict.fromkeys(one for each in found.values() for one in each))
    memory = await job.memory()
    before = memory.files
    if before is None and memory.source_files is not None:
        before = _of_earlier_version(memory.source_files, present)
    if before is None:
        await job.note(files=present)
    elif changed := names_of_changed(before, present):
        disk_of = {noted(one).name: f"disk {key}: " for key, each in found.items() for one in each}
        raise DiskReadFailed(
            f"{'; '.join(disk_of.get(name, '') + _shown(name) for name in changed)} was changed or replaced while it was being "
            "imported",
            hint="let its copying into the import root finish first, then submit again",
        )


def _as_they_are(disk: PassDisk) -> list[NotedFile]:
    """Each file of this host. DiskReadFailed, where one is gone."""
    found = []
    for path in paths(disk.reader):
        try:
            status = Path(path).stat()
        except OSError as error:
            raise DiskReadFailed(
                f"disk {disk.key}: the source file {Path(path).name} is gone: {error.strerror}",
                hint="put it back, or mount its file system again, and submit again",
            ) from error
        found.append(local(path, status))
    return found


def _of_earlier_version(note: str, present: Collection[str]) -> tuple[str, ...]:
    """The files that an earlier version of the service has noted for a job: a list, as Python writes it, of a tuple for each
    file of this host, and a text for each remote one. In the text a blank divides name and version, and either may have one:
    so `present` tells the names."""
    names = sorted({noted(one).name for one in present}, key=len, reverse=True)

    def as_now(one: tuple[str, int, int, int] | str) -> str:
        if not isinstance(one, str):
            return NotedFile(one[0], " ".join(map(str, one[1:]))).text
        name = next((name for name in names if one.startswith(f"{name} ")), one.partition(" ")[0])
        return NotedFile(name, one[len(name) + 1 :]).text

    return tuple(map(as_now, ast.literal_eval(note)))


def _shown(name: str) -> str:
    """The name of a file of this host, without its folder; a remote one's URL."""
    return Path(name).name if name.startswith("/") else name
