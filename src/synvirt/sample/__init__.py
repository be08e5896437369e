"""A real appliance to try the service on: an OVA whose disk boots by itself, made of Debian's own packages on this machine.

    kernel, busybox, guest agent (pieces) ─▶ initramfs, file systems, boot loader (disk) ─▶ OVF, manifest, tar (appliance)

Needs no root, no mount and no loop device. `build` is all that others call.
"""

from synvirt.sample.appliance import ID_PATH, Sample, build

__all__ = ["ID_PATH", "Sample", "build"]
