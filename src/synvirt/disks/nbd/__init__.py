"""NBD, and the programs that serve disks by it. Read in this order:

reader.py    an export read through libnbd
silence.py   ends a wait of libnbd's for a server that says nothing
server.py    a DiskReader as an export, read-only
served.py    a program of this host that serves a disk while it is read
qemu.py      qemu-nbd: images that only QEMU reads
fallback.py  which images those are
"""
