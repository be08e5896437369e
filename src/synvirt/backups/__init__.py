"""Backups: a run is a copy of a guest's disks into a repository, a restore the same copy the other way round.

    DiskReader ─▶ copy() ─▶ ChunkWriter ─▶ Session ─▶ packs, then a manifest      a restore point exists from here
    volume     ◀─ copy() ◀─ PointReader ◀─ Repository

Reading order: folder.py (what a storage must promise), keys.py and packs.py (the format, as docs/backup-format.md has it),
manifest.py, repository.py, disk.py; then source.py and its ways (ways.py), taking.py, runs.py, backing_up.py, restoring.py and
service.py.
"""
