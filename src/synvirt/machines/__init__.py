"""What a VM is, from whichever description: live platforms and files say the same things in the same vendor's words. No I/O.

texts.py       strangers' texts, cleaned before they are ours
guest_os.py    which family a guest belongs to, by any vendor's name for it
partitions.py  what a disk's own partition table says of its VM
concerns.py    what may go wrong, one constructor a concern
xenapi.py      XenAPI's records as a manifest: from ova.xml, or from a pool
"""
