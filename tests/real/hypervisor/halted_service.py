"""The service on a host whose UEFI firmware halts the processor.

`python -m tests.real.hypervisor.halted_service ROM ARGUMENTS…`, with the firmware's file and synvirt's arguments."""

import sys
from dataclasses import replace

from synvirt.__main__ import main
from synvirt.hypervisor import libvirt_host

if __name__ == "__main__":
    rom, *sys.argv[1:] = sys.argv[1:]
    vars(libvirt_host)["_UEFI"] = tuple(replace(one, code=rom) for one in libvirt_host._UEFI)
    main()
