"""VMDK (VMware «Virtual Disk Format 1.1», and additions of later products). Read in this order:

descriptor.py  the text that names the extents
reader.py      the DiskReader over all extents
sparse.py      headers of the three sparse extents (hosted, COWD, seSparse)
grains.py      where the grains of a sparse extent lie
stream.py      compressed grains, read at any offset
flow.py        a streamOptimized VMDK that comes once, from front to back
"""
