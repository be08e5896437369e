"""pve_api: Proxmox VE. Read in this order:

form.py       the settings of a source
api.py        the API of a cluster: one session, by token or ticket
config.py     a VM's configuration, taken apart
seen.py       all facts that were requested of a VM
concerns.py   what may go wrong with a VM, as a table
manifest.py   the API's facts of a VM, as a VmManifest
cluster.py    requests to the cluster, in our terms
node.py       a node by SSH: a fixed list of commands, and sockets forwarded
bitmaps.py    disks of a running VM, frozen, and their changes since
farewell.py   the changes until a guest went off
reading.py    specs for disks of a VM, running or off
privileges.py what our user may do, and what is missing
adapter.py    the LiveAdapter
"""
