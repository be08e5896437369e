"""vim_api: vSphere by its SOAP API (pyvmomi). adapter.py keeps the laws of LiveAdapter; the other files are its parts:

session.py     log-in, calls, faults as our errors  privileges.py  what our user may do
machines.py    properties as rows and manifests     power.py       shut down, power on
disks.py       disks of a snapshot                  changes.py     QueryChangedDiskAreas
ways.py        how a disk can be read: files.py (/folder), lease.py (export lease, kept alive by lease_guard.py), VDDK
"""
