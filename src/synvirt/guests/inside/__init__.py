"""What is inside a guest that does not run: facts from its disks, which are never mounted. Blocking code. Read in this order:

looking.py       asks for the facts, of a process in a cage
looker.py        that process: which volumes there are, and what is in them
seekable.py      a disk, a part of one or a logical volume, as a file; lvm.py puts those together
superblocks.py   a file system's kind, name and free space
files.py         files by their names; btrfs/ reads a Btrfs
linux_facts.py   what the files of a Linux guest say; windows_facts.py: what the registry of a Windows guest says
linux_devices.py the devices by which a Linux guest finds its disks; linux_cards.py: the network cards that it has settings for
menus.py         what the menu of a boot loader starts; initramfs.py: the drivers that its initramfs has for disks
loaders.py       the loaders of systems that boot by UEFI; fat.py reads where they are
"""
