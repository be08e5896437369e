"""Checks that bytes are right: checksum.py (an archive's digests), ledger.py (hashes of what a pass read), comparing.py (two
disks), sampling.py (change tracking compared with the source), looking.py (threads for all of these)."""
