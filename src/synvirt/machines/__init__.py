"""What a VM is, by any description: a vendor's live platform and its files describe VMs in the same terms. No I/O.

texts.py       untrusted texts, cleaned before they are used
guest_os.py    a guest's family, by any vendor's name for it
partitions.py  what a disk's partition table says of its VM
boot_order.py  the order of disks, where a platform lists them in any
loader.py      a loader of a system on an EFI system partition
boot_entries.py  entries for loaders in the firmware's variables, where a source's own stay behind
disk_names.py  the names by which a guest itself finds its disks
concerns.py    what may go wrong: one constructor per concern
xenapi.py      XenAPI's records as a manifest: from ova.xml, or from a pool
"""
