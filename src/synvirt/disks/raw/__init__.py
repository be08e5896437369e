"""Raw disks, in files and on block devices. Read in this order:

files.py     a range of a file or block device read; a sparse file or a block device written
holes.py     holes of an image's own file: never written, so zeros
direct.py    a block device written past the page cache
cloning.py   bytes shared by reflink instead of copied
aside.py     a volume that must stay for a while: what is written to it meanwhile
new_file.py  a raw file that gets its name only when it is complete
blank.py     a disk of zeros without a file
"""
