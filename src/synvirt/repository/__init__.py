"""The backup repository: the format, and the places it lies in. docs/backup-format.md describes every byte. Read in this order:

    keys.py        a repository's key, names of chunks, sealed frames
    packs.py       frames in a row with a footer
    manifest.py    what a restore point is
    index.py       where each chunk lies; footers.py keeps the packs' footers on this host
    folder.py      the place, call by call; peer.py the same on another SynVirt
    repository.py  sessions that write, points that are read
    disk.py        DiskWriter into a repository, DiskReader of a point
    verify.py      is it what was written; garbage.py removes what nothing needs
    peer_offer.py  a folder that this host keeps for another; peer_needs.py what its points need

Jobs that use it (runs, restores, schedules) live in `synvirt.backups`.
"""
