"""Whether bytes are what they should be: checksum.py (an archive's digests), ledger.py (hashes of what a pass read),
comparing.py (two disks), sampling.py (change tracking held against the source), looking.py (threads for all of these)."""
