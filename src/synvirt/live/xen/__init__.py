"""xen_api: XenServer and XCP-ng by XenAPI. adapter.py keeps the laws of LiveAdapter; the other files are its parts:

session.py    log-in, the coordinator, calls, tasks, failures as our errors   roles.py   what our user's role must allow
machines.py   records as rows and manifests                                   ways.py    how a disk can be read
snapshots.py  taken, released, gone; tracking                                 power.py   shut down, start, mark
nvram.py      UEFI variables, turned into OVMF's form
exports.py    what a worker reads a disk by: NBD over TLS, /export_raw_vdi; changed blocks
"""
