"""wmi_api: Hyper-V by WinRM and SMB. Read adapter.py first; scripts/ is all that is ever run on a host.

form.py      what a source of it takes              hosts.py     the host, or the nodes of a cluster
session.py   one PowerShell session, its errors     machines.py  VMs as manifests; concerns.py
tracking.py  snapshots, reference points, RCT       journal.py   which of them are ours
places.py    Windows paths as shares                power.py     off, on, marked
ways.py      which way disks are read           exporting.py the second one: Hyper-V writes them to a share
"""
