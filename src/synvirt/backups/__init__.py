"""Backups: a run copies a guest's disks into a repository, a restore is the same copy in the other direction.

    DiskReader ─▶ copy() ─▶ ChunkWriter ─▶ Session ─▶ packs, then a manifest      a restore point exists from here
    volume     ◀─ copy() ◀─ PointReader ◀─ Repository

Reading order: the package `repository` first, which is the format; then sources/guest.py and the ways next to it, the package
`worker`, runs.py, kinds.py, backing_up.py, restores/restoring.py and service.py.
"""
