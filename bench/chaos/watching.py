"""What must hold at every moment: no volume has two writers, and nobody takes a slot that is not there."""

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import psycopg

LOOK_EVERY_S = 0.1
# Whoever is given a slot is looked at by the database itself, so that none is missed. A job that comes back to a pass which it
# had begun, and one whose guest is off, do not wait (jobs/slots.py): they are counted, and not held against the number.
AUDIT = """
CREATE TABLE slots_given (number serial, resource text, job_id text, others integer, state text, again boolean);
CREATE FUNCTION slot_given() RETURNS trigger AS $$ BEGIN
    INSERT INTO slots_given (resource, job_id, others, state, again) SELECT NEW.resource, NEW.job_id,
        (SELECT count(*) FROM slots AS other JOIN hosts ON hosts.id = other.host
         WHERE other.resource = NEW.resource AND other.held AND other.job_id <> NEW.job_id
           AND hosts.until > extract(epoch FROM clock_timestamp())),
        (SELECT state FROM migrations WHERE id = NEW.job_id),
        EXISTS (SELECT 1 FROM slots_given AS before WHERE before.resource = NEW.resource AND before.job_id = NEW.job_id);
    RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER slot_given BEFORE UPDATE ON slots FOR EACH ROW WHEN (NEW.held AND NOT OLD.held) EXECUTE FUNCTION slot_given();
"""


def audit_slots(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(AUDIT)


def slots_exceeded(url: str, most: dict[str, int]) -> tuple[int, list[str]]:
    """How many were given in all, and those that were not to be had. `most` by how a resource's key begins."""
    with psycopg.connect(url) as connection:
        given = connection.execute("SELECT resource, others, state, again FROM slots_given").fetchall()
    wrong = []
    for resource, others, state, again in given:
        limit = min((number for key, number in most.items() if resource.startswith(key)), default=0)
        if resource.endswith(" in all"):
            limit = most["in all"]
        if others >= limit and not again and state != "CuttingOver":
            wrong.append(f"{resource}: {others} of {limit} were held, and one more was given in {state}")
    return len(given), wrong


def workers(folder: Path) -> list[Path]:
    """The processes that copy for the chaos in that folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and b"synvirt.worker" in (process / "cmdline").read_bytes():
                found += [process] if f"SHARED={folder}/".encode() in (process / "environ").read_bytes() else []
    return found


def writers(folder: Path) -> Counter[str]:
    """How many processes hold each volume open for writing."""
    found: Counter[str] = Counter()
    for process in workers(folder):
        with contextlib.suppress(OSError, IndexError):
            held = set()
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if "/volumes/" in target or "/pool/" in target:
                    flags = int((process / "fdinfo" / descriptor.name).read_text().split("flags:")[1].split()[0], 8)
                    if flags & (os.O_WRONLY | os.O_RDWR):
                        held.add(target)
            found.update(held)
    return found


class Writers:
    """`doubled`: the volumes that had two writers at once. `looks`: how often all processes were looked at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.doubled: set[str] = set()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.doubled |= {volume for volume, count in writers(self._folder).items() if count > 1}
            self.looks += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()
