"""Changes of a repository's key: what is written from then on opens only with the new key, and the new key opens all.

    keys/<key_check of the new key>   a line of JSON:
      key_check   of the new key, as in the file's name
      before      the key before it, sealed by the new one: so each key opens what was written before it
      by          the new key's check, sealed by the key before: only a holder of that key can announce a change of it

Nothing is written again: an older point stays as it is, and the older key opens it as long as it is kept.
docs/backup-format.md.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from synvirt.errors import RepositoryDamaged, RepositoryKeyWrong
from synvirt.repository.folder import Folder, put
from synvirt.repository.keys import KEY_BYTES, Keys

FOLDER = "keys"
# A change a month for eight years: more are not taken from peers.
CHANGES_MAX = 100
CHANGE_BYTES_MAX = 4096
# All files are read when a repository is opened, as a stranger's must not hide a change: 40 MB at most.
FILES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the key. `before`: the old key sealed by the new; `by`: the new key's check sealed by the old."""

    check: str
    before: bytes
    by: bytes


def write(folder: Folder, old: bytes, new: bytes) -> None:
    """Makes `new` the repository's key from now on. Idempotent."""
    before, after = Keys(old), Keys(new)
    if any(change.check == after.check for change in changes(folder)):
        return
    line = {
        "key_check": after.check,
        "before": base64.b64encode(after.seal(old, belongs_to=_before(after.check))).decode(),
        "by": base64.b64encode(before.seal(after.check.encode(), belongs_to=_after(before.check))).decode(),
    }
    put(folder, f"{FOLDER}/{after.check}", [json.dumps(line).encode() + b"\n"])


def take_back(folder: Folder, new: bytes) -> None:
    """Removes the change to `new`, with which nothing was written yet. Idempotent."""
    folder.delete(f"{FOLDER}/{Keys(new).check}")
    folder.sync_folder(FOLDER)


def parsed(name: str, content: bytes) -> Change:
    """ValueError, where it is no change."""
    found = json.loads(content)
    if not isinstance(found, dict) or found.get("key_check") != name:
        raise ValueError("it is another key's")
    before, by = (base64.b64decode(str(found.get(field, "")), validate=True) for field in ("before", "by"))
    return Change(name, before, by)


def changes(folder: Folder) -> list[Change]:
    """The readable changes: anybody who can write to the folder may leave other files. RepositoryDamaged: too many to read."""
    if all(entry.name != FOLDER for entry in folder.entries("")):
        return []
    return list(_changes(folder))


def _changes(folder: Folder) -> Iterator[Change]:
    entries = folder.entries(FOLDER)
    if len(entries) > FILES_MAX:
        raise RepositoryDamaged(
            f"the repository's folder {FOLDER} has {len(entries)} files, and a key changes {CHANGES_MAX} times at most",
            hint="find out who can write there, and remove the files whose names are no key_check of yours",
        )
    for entry in entries:
        if entry.size_bytes <= CHANGE_BYTES_MAX:
            try:
                yield parsed(entry.name, folder.read(f"{FOLDER}/{entry.name}", 0, entry.size_bytes))
            except (RepositoryDamaged, ValueError, RecursionError):
                continue


def masters(folder: Folder, first_check: str, master: bytes) -> list[bytes]:
    """All keys of a repository that `master` opens, newest first, down to the key of its header. RepositoryKeyWrong: it is none
    of them, or an older one."""
    known = changes(folder)
    by_check = {change.check: change for change in known}
    found = [master]
    while (keys := Keys(found[-1])).check != first_check:
        change = by_check.get(keys.check)
        older = b"" if change is None else _opened(keys, change.before, _before(keys.check))
        if len(older) != KEY_BYTES or older in found:
            raise RepositoryKeyWrong("this is not the key of that repository")
        found.append(older)
    if _announced(Keys(master), known):
        raise RepositoryKeyWrong(
            "this repository has a newer key: nothing is written with this one any more",
            hint="forget the repository here, and add it again with the recovery key that the key change printed",
        )
    return found


def rivals(folder: Folder, old: bytes, new: bytes) -> bool:
    """Whether the key after `old` is to be another one than `new`, too: two hosts change it at once."""
    return not _announced(Keys(old), changes(folder)) <= {Keys(new).check}


def _announced(keys: Keys, known: Iterable[Change]) -> set[str]:
    """The key_checks of the keys that a holder of this one has announced."""
    return {change.check for change in known if _opened(keys, change.by, _after(keys.check)) == change.check.encode()}


def _opened(keys: Keys, sealed: bytes, belongs_to: bytes) -> bytes:
    try:
        return keys.unseal(sealed, belongs_to=belongs_to, what="a key")
    except RepositoryDamaged:
        return b""


def _before(check: str) -> bytes:
    return b"the key before " + check.encode()


def _after(check: str) -> bytes:
    return b"the key after " + check.encode()
