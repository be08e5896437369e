"""vSphere: vCenter 6.5 and later, and ESXi, by the vSphere Web Services API on port 443 (pyvmomi).

    adapter      the LiveAdapter: asyncio outside, threads inside
    form         a source's credentials and options
    session      login, keep-alive, properties, tasks, faults                blocking
    versions     chooses the version of the API                              blocking
    privileges   the privileges that our user needs                          blocking
    inventory    its VMs, folders, hosts, networks, datastores               blocking
    machines     VMs as manifests                                            no I/O
    concerns     what may hinder a VM's move                                 no I/O
    disks        disks by their backings                                     no I/O
    changes      snapshots, change tracking                                  blocking
    ways         how a disk is read: VDDK, files, an export lease            no I/O
    reading      a snapshot's disks, opened by one of these ways             blocking
    files        the datastore's files                                       blocking
    lease        the export lease                                            blocking
    lease_guard  starts a process that ends a lease whose service was killed
    hosts        the ESXi hosts that can be reached from here                blocking
    nvram        UEFI variables in VMware's form                             no I/O
    power        off, on, marked                                             blocking
    tap          the platform's answers, for `sources record`                blocking

disks/vsphere/ reads the bytes.
"""
