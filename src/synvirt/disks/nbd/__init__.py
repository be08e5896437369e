"""NBD, and the programs that serve disks by it. Read in this order:

reader.py        an export read through libnbd
silence.py       ends libnbd's wait for a silent server
server.py        a DiskReader as an export, read-only
served.py        a program of this host that serves a disk while it is read
qemu.py          qemu-nbd: images that only QEMU reads
fallback.py      which images those are
qcow2_writer.py  a new qcow2 file, written by qemu-img from our server
"""
