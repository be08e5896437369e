"""The author of a restore point: a point is signed with its host's key; the author is known, if this host has a line with that
key.

Anyone with a repository's key can write valid points into it, but cannot sign as another host. Known authors are this host, and
those of the setting backup_signers, a file of lines as `synvirt receipt key` prints them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from synvirt.backups.under_way import UnderWay
from synvirt.errors import BackupNotFound, Internal, MalformedArchive, RepositoryDamaged, cause_of
from synvirt.proof.signing import BACKUPS, HostKey, PublicKey
from synvirt.repository.manifest import Signature, Unread
from synvirt.repository.repository import Repository
from synvirt.sizes import counted

# The code of a run's warning.
UNKNOWN = "E_BAK_AUTHOR_UNKNOWN"
# Fewer hosts than this share repositories; a longer file is not one of signers.
_LINES_MAX = 10_000
Standing = Literal["own", "known", "unknown", "none"]


@dataclass(frozen=True, slots=True)
class Author:
    """`fingerprint`: of the key whose signature was checked; None: the point is not signed. `identity`: this host's name for
    it, never its own."""

    standing: Standing
    fingerprint: str | None = None
    identity: str | None = None


class Authors:
    """`key`: the key that this host signs with; None: it does not sign. `signers`: a file, read again each time."""

    def __init__(self, key: HostKey | None = None, signers: Path | None = None) -> None:
        self._key, self._signers = key, signers

    def sign(self, statement: bytes) -> Signature | None:
        """This host's signature of a point's statement; None, if the host has no key."""
        key = self._key
        return None if key is None else Signature(key=key.public.line, sshsig=key.sshsig(statement, BACKUPS))

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of this host's key."""
        return None if self._key is None else self._key.public.fingerprint

    def of(self, unread: Unread) -> Author:
        """The author of exactly these bytes: another manifest may have replaced them when the point is read again.
        RepositoryDamaged, if the signature does not fit; Internal, if backup_signers cannot be read."""
        key = _signer(unread)
        if key is None:
            return Author("none")
        if self._key is not None and key == self._key.public:
            return Author("own", key.fingerprint, self._key.identity)
        identity = self._known().get(key)
        return Author("unknown" if identity is None else "known", key.fingerprint, identity)

    def signer(self, unread: Unread) -> str | None:
        """Only the fingerprint, whether it is known or not. RepositoryDamaged."""
        key = _signer(unread)
        return None if key is None else key.fingerprint

    def _known(self) -> dict[PublicKey, str]:
        if self._signers is None:
            return {}
        try:
            lines = self._signers.read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise Internal(f"the file of the setting backup_signers cannot be read: {cause_of(error)}") from error
        try:
            return {
                PublicKey.from_signers(line, "backup_signers"): line.split(" ", 1)[0]
                for line in lines[:_LINES_MAX]
                if line.strip() and not line.startswith("#")
            }
        except MalformedArchive as error:
            raise Internal(f"{error.detail}: each line is one that `synvirt receipt key` prints") from error

    # ── a run's warnings about them ──────────────────────────────────────────────────────────────────────────────────

    def warn(self, under_way: UnderWay, unread: Unread, vm_id: str) -> Author | None:
        """Warns of an unknown author; None, if this host signs nothing. RepositoryDamaged."""
        if self._key is None:
            return None
        author = self.of(unread)
        reason = doubt(author)
        # A run that continues after its service has ended has warned already.
        if reason is not None and all(warning.code != UNKNOWN for warning in under_way.run.warnings):
            under_way.warn(UNKNOWN, reason, vm_id)
        return author

    def checked(self, under_way: UnderWay, repository: Repository, point_id: UUID, vm_id: str) -> Unread:
        """The manifest of a point that the run reads, after `warn`. Both use one reading, and `sha256` is of the judged bytes.
        A run that continues after its service has ended accepts only the manifest that it began with. BackupNotFound,
        RepositoryDamaged."""
        unread = repository.unread(point_id, under_way.run.manifest_sha256)
        self.warn(under_way, unread, vm_id)
        if under_way.run.manifest_sha256 is None:
            under_way.note(manifest_sha256=unread.sha256)
        return unread

    def is_known(self, unread: Unread) -> bool:
        """Whether this host or a known one has signed it, or this host signs nothing. RepositoryDamaged, Internal, as in
        `of`."""
        return self._key is None or doubt(self.of(unread)) is None

    def warn_of_all(self, under_way: UnderWay, repository: Repository) -> Sequence[tuple[UUID, str]]:
        """Like `warn`, in one warning; returns the points that differ from what was signed, each with what is wrong."""
        if self._key is None:
            return ()
        wrongs: list[tuple[UUID, str]] = []
        counts: dict[str, int] = {}
        for point_id in repository.point_ids():
            try:
                unread = repository.unread(point_id)
            except (RepositoryDamaged, BackupNotFound):
                continue  # which the verification itself reports
            try:
                author = self.of(unread)
            except RepositoryDamaged as error:
                wrongs.append((point_id, error.detail))
                continue
            if (reason := doubt(author)) is not None:
                counts[reason] = counts.get(reason, 0) + 1
        for reason, count in counts.items():
            under_way.warn(UNKNOWN, f"{counted(count, 'restore point')}: {reason}")
        return wrongs


def _signer(unread: Unread) -> PublicKey | None:
    """The signer, from the bytes alone: the child process that parses a point cannot influence the result."""
    signature = unread.signature
    if signature is None:
        return None
    try:
        key = PublicKey.from_signers(signature.key, "its key")
        key.check_sshsig(unread.statement, signature.sshsig, "its signature", BACKUPS)
    except MalformedArchive as error:
        raise RepositoryDamaged(
            f"restore point {unread.point_id} is not what its author signed: {error.detail}",
            hint="somebody who has the repository's key changed it, or made it look like another's: do not restore it",
        ) from error
    return key


def doubt(author: Author) -> str | None:
    """The warning about an unknown author; None, if the author is known."""
    if author.standing == "none":
        return "not signed: made before points were, or by somebody who has the repository's key and no host's"
    if author.standing == "unknown":
        return (
            f"signed by the key {author.fingerprint}, which this host does not know: compare it with «synvirt receipt key» of "
            "the host that made it, and add that line to the file of the setting backup_signers"
        )
    return None
