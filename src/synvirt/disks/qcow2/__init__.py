"""qcow2, versions 2 and 3 (QEMU's docs/interop/qcow2.txt). Read in this order:

header.py       the first cluster: sizes, features, where the tables lie
mapping.py      from guest offsets to places in the file
entries.py      the entries of its tables, as runs
reader.py       the DiskReader, over its backing files
compressed.py   compressed clusters, zlib and zstd
bitmaps.py      persistent dirty bitmaps
named_files.py  the backing file and the external data file
errors.py       errors of parts that cannot be read
"""
