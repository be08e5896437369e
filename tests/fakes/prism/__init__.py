"""Nutanix, as far as it can be had without one: a Prism of ours, and the servers of its bytes, which are real.

schema.py   v4.json and v3.json: facts of the vendor's; every request and every answer is held against them
state.py    the VMs, snapshots, volume groups and images of a cluster, in a folder
central.py  Prism Central's v4 over that state   element.py  Prism Element's v3 and v2
server.py   both over HTTPS, with faults         nfs.py, iscsi.py  nfs-ganesha and tgt, which serve the bytes
"""
