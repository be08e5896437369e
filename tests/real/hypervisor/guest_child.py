"""A process that rules one guest, to be killed: `python -m tests.real.hypervisor.guest_child DATA_DIR ACTION JOB_ID [PATH]`.

It says what it has done, a line each, on stdout.
"""

import sys
import time
from pathlib import Path
from uuid import UUID

from synvirt.errors import SynvirtError
from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.hypervisor.locked import gone_or
from synvirt.migrations.landing import machine_of
from synvirt.model.job import Domain
from synvirt.model.machine import VmManifest
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job


def say(text: object) -> None:
    print(text, flush=True)


def begin(host: LibvirtHost, folder: Path, job_id: UUID) -> None:
    image = folder / "disk.raw"
    with image.open("wb") as file:
        file.truncate(MIB)
    manifest = VmManifest(vm_id="x", name="guest", disks=job().manifest.disks, memory_bytes=64 * MIB)  # type: ignore[union-attr]
    migration = job(manifest).model_copy(update={"id": job_id})
    domain: Domain = host.domain_xml(machine_of(migration), [Volume("disk1", str(image), "file")])
    say("drawn")
    host.define(domain)
    say("defined")
    host.start(job_id)
    say("started")


def main() -> None:
    folder, action, job_id = Path(sys.argv[1]), sys.argv[2], UUID(sys.argv[3])
    host = LibvirtHost(f"qemu:///embed?root={folder / 'libvirt'}", folder)
    try:
        if action == "begin":
            begin(host, folder, job_id)
            time.sleep(60)
        elif action == "go on":
            host.start(job_id)
            say("started")
            host.wait_until_booted(job_id, 1, lambda: False)
        elif action == "restart":
            found = host._find(str(job_id))
            assert found is not None
            gone_or(found.destroy)  # opened just now, libvirt still looks for it, and may find it gone by then
            host.start(job_id)
            say("restarted")
        elif action == "read":
            host.wait_until_booted(job_id, 60, lambda: False)  # the agent is found again
            sys.stdout.buffer.write(host.read_guest_file(job_id, sys.argv[4]))
        elif action == "end":
            host.undefine(job_id, job_id)
            say("gone")
    except SynvirtError as error:
        say(f"{type(error).__name__}: {error.detail} ({error.hint})")
    except KeyboardInterrupt:
        say("interrupted")
    host.close()


if __name__ == "__main__":
    main()
