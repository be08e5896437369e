"""xen_api: XenServer and XCP-ng by XenAPI. adapter.py is the LiveAdapter; the other files are its parts:

session.py    log-in, the coordinator, calls, tasks, failures as our errors   roles.py   the rights that our user's role needs
machines.py   records as rows and manifests                                   ways.py    the ways to read a disk
snapshots.py  made, released, removed; tracking                               power.py   shut down, start, mark
nvram.py      UEFI variables, turned into OVMF's form
exports.py    specs for a worker to read a disk: NBD over TLS, /export_raw_vdi; changed blocks
"""
