"""python -m bench.rehearsal [GIB [FOLDER]]: how long until the guest of a large volume is started from a clone of it.

The sample at the beginning of a sparse volume of this many GiB (500), EXTENTS more of 4 KiB all over it, on XFS, or in a
new folder under FOLDER, on its file system: cloned as a rehearsal clones it, defined and started. How long it then takes to
boot is the guest's own. No conversion, no network. Needs root, xfsprogs and libvirt.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from bench.reflink import reflink_folder
from synvirt.destinations.directory import DirectoryDestination
from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.sample import build
from synvirt.settings import Settings
from synvirt.sizes import GIB, KIB, MIB
from tests.contracts.hypervisors import job

# A file system of a server that is some years old has this many, and reflinks are made an extent at a time.
EXTENTS = 20_000
ROUNDS = 3
VOLUME = f"{UUID(int=1)}/disk.raw"


def main() -> None:
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 500) * GIB
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="synvirt-bench-") as folder,
        _place(Path(folder), 2 * size) as place,
    ):
        base = Path(folder)
        raw = build(base / "sample", payload_mib=8, keep_raw=True).raw
        assert raw is not None
        destination = DirectoryDestination(place)
        destination.create(VOLUME, size)
        _fill(Path(destination.device(VOLUME)), raw, size)
        host = LibvirtHost(Settings(data_dir=base / "data").hypervisor_uri, base / "data")
        try:
            for number in range(ROUNDS):
                cloned, started = _round(destination, host, size, f"{UUID(int=1)}/clone-{number}.raw")
                print(f"cloned in {cloned:.2f} s, started after {started:.2f} s", flush=True)
        finally:
            host.close()


@contextmanager
def _place(folder: Path, size: int) -> Iterator[Path]:
    if len(sys.argv) > 2:
        with tempfile.TemporaryDirectory(dir=sys.argv[2], prefix="synvirt-bench-") as place:
            Path(place).chmod(0o711)
            yield Path(place)
        return
    with reflink_folder(folder, size) as place_:
        yield place_


def _fill(volume: Path, raw: Path, size: int) -> None:
    chance, block = random.Random(22), random.Random(23).randbytes(4 * KIB)
    with volume.open("r+b") as target, raw.open("rb") as source:
        while piece := source.read(MIB):
            target.write(piece)
        for _ in range(EXTENTS):
            target.seek(chance.randrange(GIB // len(block), size // len(block)) * len(block))
            target.write(block)


def _round(destination: DirectoryDestination, host: LibvirtHost, size: int, clone: str) -> tuple[float, float]:
    """Seconds from the beginning until each."""
    clock = _clock()
    destination.clone(VOLUME, clone)
    cloned = clock()
    disk = Disk(key="disk1", label="disk1", capacity_bytes=size)
    manifest = VmManifest(vm_id="x", name="bench", disks=(disk,), guest_os=GuestOs(family="linux"), memory_bytes=256 * MIB)
    migration = job(manifest)
    volume = Volume("disk1", destination.device(clone), "file", over=destination.backing_file(VOLUME, clone))
    domain = host.domain_xml(machine_of(migration), [volume])
    try:
        host.define(domain)
        host.start(UUID(domain.uuid))
        return cloned, clock()
    finally:
        host.undefine(migration.id, migration.id)
        destination.unclone(VOLUME, clone)


def _clock() -> Callable[[], float]:
    began = time.monotonic()
    return lambda: time.monotonic() - began


if __name__ == "__main__":
    main()
