"""SynVirt moves virtual machines to a KVM host: from other platforms and from files.

Everything is a copy of extents from a DiskReader to a DiskWriter.

    API ─▶ Plan ─▶ Engine ─▶ live adapter │ offline importer        who the VM is, and what its disks are
                     │               │ ReaderSpec (data)
                     │          copy worker:  DiskReader ─▶ copy() ─▶ DiskWriter     (a process of its own)
                     │                                                  │ destination │ repository
                     ├─▶ guest preparer (Windows: virtio drivers)
                     └─▶ hypervisor (define, start, see it boot)
                   Store (a row a job, an event a move) ─▶ SSE ─▶ web page, command line

Reading order: errors, model, blocks, copying, disks/specs, migrations/states, migrations/steps, migrations/engine, then one
importer (offline/ovf/archive), one destination (destinations/directory), and main, which puts the concrete things together.
"""

__version__ = "0.1.0"
