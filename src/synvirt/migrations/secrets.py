"""The secrets of jobs that read remote files: sealed next to the job, never in its document, deleted when it ends.

Blocking code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from synvirt.errors import AuthFailed, Internal
from synvirt.keyring import Keyring
from synvirt.store import Store


class SealedElsewhere(AuthFailed):
    """The credentials are sealed with another key than this host's. It may pass, when an operator copies the fleet's key
    here."""


def sealed_elsewhere(what: str) -> SealedElsewhere:
    """Of credentials that the key of this host does not open."""
    return SealedElsewhere(
        f"the credentials of {what} cannot be opened with the key of this host",
        hint="copy keyring/migrator.key from the host that sealed them, or give the credentials again: "
        "docs/operating.md, «Several hosts»",
    )


def belongs_to(owner: str, id_: UUID) -> bytes:
    """What a sealed secret is bound to: a `source`, or a `job` that reads a remote file."""
    return f"{owner} {id_}".encode()


class JobSecrets:
    """The sealed secrets of jobs, in the store."""

    def __init__(self, store: Store, keyring: Keyring) -> None:
        self._store, self._keyring = store, keyring

    @contextmanager
    def sealed(self, job_id: UUID, secret: bytes) -> Iterator[bytes]:
        """The sealed secret. Store it within the block, so that the key is not changed in between."""
        with self._keyring.held():
            yield self._keyring.seal(secret, belongs_to=belongs_to("job", job_id))

    def opened(self, job_id: UUID) -> bytes | None:
        """The secret of a job; None, where it has none. SealedElsewhere, where the keyring has another key."""
        sealed = self._store.sealed(job_id)
        try:
            return None if sealed is None else self._keyring.unseal(sealed, belongs_to=belongs_to("job", job_id))
        except Internal as error:
            raise sealed_elsewhere(f"job {job_id}") from error


def no_secrets(job_id: UUID) -> bytes | None:
    """For rooms without a keyring."""
    raise Internal(f"job {job_id} has secrets, and there is no keyring to open them")
