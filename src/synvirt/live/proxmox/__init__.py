"""pve_api: Proxmox VE. Read in this order:

form.py       what a source takes
api.py        the API of a cluster: one session, by token or ticket
config.py     a VM's configuration, taken apart
seen.py       all that was asked about a VM
concerns.py   what may go wrong with a VM, as a table
manifest.py   what the API says of a VM, as a VmManifest
cluster.py    what is asked of the cluster, in our words
node.py       a node by SSH: a fixed list of commands, and sockets forwarded
qmp.py        QEMU's monitor
bitmaps.py    disks of a running VM held still, and what changed since
farewell.py   what changed until a guest went off
reading.py    disks of a VM, running or off, as something to read
privileges.py what our user may do, and what is missing
adapter.py    the LiveAdapter
"""
