"""Checks that bytes are right:

checksum.py      an archive's digests, checked while the same bytes are copied
block_hashes.py  a hash of each block of a volume, while passes write it; receipt_rows.py: as a receipt has them
ledger.py        hashes of what one pass read; digests.py makes them
repairing.py     a volume compared with such hashes, and what differs brought back from its source
comparing.py     two disks
sampling.py      change tracking compared with the source, by samples; unchanged.py: in full
looking.py       threads for all of these
"""
