"""wmi_api: Hyper-V by WinRM and SMB. Read adapter.py first; only scripts/ is ever run on a host.

form.py      the settings of a source               hosts.py     the host, or the nodes of a cluster
session.py   one PowerShell session, its errors     machines.py  VMs as manifests; concerns.py
tracking.py  snapshots, reference points, RCT       journal.py   those of them that are ours
places.py    Windows paths as shares                power.py     off, on, marked
ways.py      the way to read disks                  exporting.py the second way: Hyper-V writes them to a share
answers.py   the form of each script's answer
"""
