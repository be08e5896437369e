"""Common mistakes have a code of the side, migrations or backups, that they are made on: of a request, or of a command."""

from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupForbidden,
    BackupInternal,
    BackupNotFound,
    BackupUnauthorized,
    BackupUnsupportedMediaType,
    BadRequest,
    Conflict,
    Forbidden,
    Internal,
    InvalidPlan,
    NotFound,
    SynvirtError,
    Unauthorized,
    UnsupportedMediaType,
)

_OF_BACKUPS: dict[type[SynvirtError], type[SynvirtError]] = {
    BadRequest: BackupBadRequest,
    UnsupportedMediaType: BackupUnsupportedMediaType,
    InvalidPlan: BackupBadRequest,
    NotFound: BackupNotFound,
    Conflict: BackupConflict,
    Internal: BackupInternal,
    Unauthorized: BackupUnauthorized,
    Forbidden: BackupForbidden,
}


def of_backups(error: SynvirtError) -> SynvirtError:
    """The error as the side of backups names it; the same, where it has a code of its own."""
    kind = _OF_BACKUPS.get(type(error))
    return error if kind is None else kind(error.detail, hint=error.hint)
