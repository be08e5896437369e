"""The backup repository: the format, and the places that hold it. docs/backup-format.md describes every byte. Read in this
order:

    keys.py        a repository's key, names of chunks, sealed frames
    packs.py       frames in a row with a footer
    manifest.py    a restore point's description
    index.py       the place of each chunk; footers.py keeps copies of the packs' footers on this host
    folder.py      calls to the place; peer.py: the same for another SynVirt
    repository.py  points that are read; session.py: one that is written
    condemned.py   packs that nothing needed: what is written does not rely on them
    disk.py        DiskWriter into a repository, DiskReader of a point
    verify.py      whether it is what was written; garbage.py removes what nothing needs
    peer_offer.py  a folder that this host keeps for another; peer_needs.py what its points need

Jobs that use it (runs, restores, schedules) live in `synvirt.backups`.
"""

import os

# numpy looks up chunks here, and multiplies no matrices: starting its threads for that takes longer than loading it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
