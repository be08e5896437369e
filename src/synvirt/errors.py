"""Every error that leaves the service, once.

    SynvirtError                 the root of all of them
    ├── BadRequest … HostPathRejected     the caller can correct it (HTTP 4xx)
    ├── SourceUnreachable, AuthFailed     the platform we read from (HTTP 502)
    └── DiskReadFailed … Internal         the job or the host (HTTP 500, mostly in `last_error`)

A class is one E_ code of the specification (part 7), its HTTP status and its meaning: the docstring's first line is the title
that a caller sees and the default detail. An instance adds what happened (`detail`, with the names and numbers a person needs)
and what to do about it (`hint`); both show long values shortened. Foreign exceptions become one of these where they occur,
chained with `from`.
"""

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

# Longer than paths, URLs and public keys usually are; and longer than the end of a guest's console.
WORD_CHARS_MAX, MESSAGE_CHARS_MAX = 500, 3000
# What is left of a longer word: a path's end tells as much as its beginning.
_WORD_BEGIN, _WORD_END = 150, 50
LEFT_OUT = "…"


def shortened(message: str) -> str:
    """The message with «…» for the middle of each word that is longer than WORD_CHARS_MAX, and for its own middle, if what is
    left is longer than MESSAGE_CHARS_MAX: its beginning names the thing, its end says what is wrong."""
    if len(message) <= WORD_CHARS_MAX:
        return message
    import re  # a command without long messages does not need it

    long = rf"\S{{{WORD_CHARS_MAX + 1},}}"
    message = re.sub(long, lambda word: f"{word[0][:_WORD_BEGIN]}{LEFT_OUT}{word[0][-_WORD_END:]}", message)
    if len(message) <= MESSAGE_CHARS_MAX:
        return message
    kept = MESSAGE_CHARS_MAX // 2
    return f"{message[:kept]}{LEFT_OUT}{message[-kept + len(LEFT_OUT) :]}"


class SynvirtError(Exception):
    """Something went wrong inside the service."""

    code: ClassVar[str] = "E_MIG_INTERNAL"
    status: ClassVar[int] = 500

    def __init__(self, detail: str = "", *, hint: str | None = None) -> None:
        self.detail = shortened(detail or self.title())
        self.hint = hint and shortened(hint)
        super().__init__(self.detail)

    @classmethod
    def title(cls) -> str:
        """The first line of the docstring of the class that has the code; a class below it is for the code, not for callers."""
        named = next(one for one in cls.__mro__ if "code" in vars(one))
        return (named.__doc__ or "").strip().splitlines()[0]


class BadRequest(SynvirtError):
    """The request is not valid."""

    code, status = "E_MIG_BAD_REQUEST", 400


class UnsupportedMediaType(BadRequest):
    """The body's Content-Type is not one that the request takes."""

    status = 415


class InvalidPlan(SynvirtError):
    """The plan cannot be executed as it is."""

    code, status = "E_MIG_INVALID_PLAN", 400


class UnsupportedFormat(SynvirtError):
    """The file or disk is not of a kind that can be read."""

    code, status = "E_MIG_UNSUPPORTED_FORMAT", 400

    def __init__(self, detail: str = "", *, hint: str | None = None, holds: tuple[str, ...] = ()) -> None:
        """`holds`: the names of the machines in a file with several; the caller must name one of them."""
        super().__init__(detail, hint=hint)
        self.holds = holds


class MalformedArchive(SynvirtError):
    """The archive or one of its parts is damaged, or is not what it claims to be."""

    code, status = "E_MIG_MALFORMED_ARCHIVE", 400


class HostPathRejected(SynvirtError):
    """The file cannot be opened under the import root."""

    code, status = "E_MIG_HOST_PATH_REJECTED", 400


class Unauthorized(SynvirtError):
    """The caller's credentials are missing or wrong."""

    # It has its own code, as E_MIG_AUTH_FAILED is about a source's credentials.
    code, status = "E_MIG_UNAUTHENTICATED", 401


class Forbidden(SynvirtError):
    """The caller is not permitted to do this."""

    code, status = "E_MIG_FORBIDDEN", 403


class NotFound(SynvirtError):
    """There is no such object."""

    code, status = "E_MIG_NOT_FOUND", 404


class VmNotFound(NotFound):
    """The source has no such virtual machine or disk."""

    code = "E_MIG_VM_NOT_FOUND"

    def __init__(self, detail: str = "", *, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint or "list the source's VMs: it was removed there, or its user may not see it")


class UploadNotFound(NotFound):
    """There is no such upload: it expired or was removed."""

    code = "E_MIG_UPLOAD_NOT_FOUND"


class Conflict(SynvirtError):
    """The request does not fit the present state."""

    code, status = "E_MIG_CONFLICT", 409


class UploadTooLarge(SynvirtError):
    """The upload is larger than the limit or the free space."""

    code, status = "E_MIG_UPLOAD_REJECTED", 413


class UploadRejected(SynvirtError):
    """The upload's SHA-256 is not the one announced."""

    code, status = "E_MIG_UPLOAD_REJECTED", 422


class SourceUnreachable(SynvirtError):
    """The source platform cannot be reached, or does not work as expected."""

    code, status = "E_MIG_SOURCE_UNREACHABLE", 502

    def __init__(self, detail: str = "", *, hint: str | None = None, waited_s: float = 0.0) -> None:
        """`waited_s`: how long the platform had not answered before this was raised; 0, if it refused at once."""
        super().__init__(detail, hint=hint)
        self.waited_s = waited_s


class AuthFailed(SynvirtError):
    """The source platform refused access, or is not trusted."""

    code, status = "E_MIG_AUTH_FAILED", 502


class CbtUnsupported(SynvirtError):
    """The source cannot track the guest's changes."""

    code = "E_MIG_CBT_UNSUPPORTED"


class CbtReset(SynvirtError):
    """The source lost its change tracking in the middle of the migration."""

    code = "E_MIG_CBT_RESET"


class SnapshotFailed(SynvirtError):
    """The source's snapshot could not be made or used."""

    code = "E_MIG_SNAPSHOT_FAILED"


class DiskReadFailed(SynvirtError):
    """A source disk could not be read."""

    code = "E_MIG_DISK_READ_FAILED"


class DiskWriteFailed(SynvirtError):
    """A destination volume could not be written."""

    code = "E_MIG_DISK_WRITE_FAILED"


class V2vFailed(SynvirtError):
    """The guest's virtio drivers could not be injected."""

    code = "E_MIG_V2V_FAILED"


class DomainDefineFailed(SynvirtError):
    """The domain could not be defined."""

    code = "E_MIG_DOMAIN_DEFINE_FAILED"


class HypervisorAway(DomainDefineFailed):
    """This host's libvirtd is away, as while an update restarts it. What was asked when it went may have been done."""


class GuestBootFailed(SynvirtError):
    """The imported guest did not boot."""

    code = "E_MIG_GUEST_BOOT_FAILED"

    def __init__(self, detail: str = "", *, hint: str | None = None, shown: str = "", other_bus_may_help: bool = False) -> None:
        """`shown`: the end of the console. `other_bus_may_help`: the guest seems to have no driver for its disks."""
        super().__init__(f"{detail}; {shown}" if shown else detail, hint=hint)
        self.summary = detail or self.title()
        self.other_bus_may_help = other_bus_may_help


class GuestHasNoRoom(GuestBootFailed):
    """The guest is paused, as what it writes has no room on this host: nothing is known of whether it boots."""


class DeltaTooLarge(SynvirtError):
    """The guest changes faster than its changes can be copied."""

    code = "E_MIG_DELTA_TOO_LARGE"


class OutageTooLong(SynvirtError):
    """The outage is or would be longer than the plan's outage_budget_s."""

    code = "E_MIG_OUTAGE_TOO_LONG"


class Cancelled(SynvirtError):
    """The operator cancelled the job."""

    code = "E_MIG_CANCELLED"


class PersistFailed(SynvirtError):
    """The persistent store could not be used."""

    code = "E_MIG_PERSIST_FAILED"


class ServiceUnreachable(SynvirtError):
    """The SynVirt service cannot be reached or used."""

    # Only clients raise it; the service itself never answers it.
    code, status = "E_MIG_SERVICE_UNREACHABLE", 503


class Internal(SynvirtError):
    """Something went wrong inside the service."""

    code = "E_MIG_INTERNAL"


# ── backups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class BackupNotFound(NotFound):
    """There is no such object among the backups."""

    code = "E_BAK_NOT_FOUND"


class BackupUnauthorized(Unauthorized):
    """The credentials of a caller of the backups are missing or wrong."""

    code = "E_BAK_UNAUTHENTICATED"


class BackupForbidden(Forbidden):
    """The caller is not permitted to do this with backups."""

    code = "E_BAK_FORBIDDEN"


class BackupConflict(Conflict):
    """The request does not fit the present state of the backups."""

    code = "E_BAK_CONFLICT"


class BackupBadRequest(BadRequest):
    """The backup cannot be made as it is asked for."""

    code = "E_BAK_BAD_REQUEST"


class BackupUnsupportedMediaType(BackupBadRequest):
    """The body's Content-Type is not one that a request to the backups takes."""

    status = 415


class SourceRunning(Conflict):
    """The guest's disks are in use: it runs, or its memory is saved."""

    code = "E_BAK_SOURCE_RUNNING"


class SourceUnsupported(BadRequest):
    """A disk or another part of the guest cannot be backed up or restored."""

    code = "E_BAK_SOURCE_UNSUPPORTED"


class QuiesceFailed(SynvirtError):
    """The guest's file systems could not be frozen."""

    code = "E_BAK_QUIESCE_FAILED"


class GuestStillFrozen(SynvirtError):
    """The guest's file systems were frozen, and do not thaw."""

    code = "E_BAK_GUEST_STILL_FROZEN"


class SourceSnapshotFailed(SynvirtError):
    """The guest's disks could not be frozen at one moment."""

    code = "E_BAK_SNAPSHOT_FAILED"


class SourceReadFailed(SynvirtError):
    """A disk of the guest could not be read."""

    code = "E_BAK_SOURCE_READ_FAILED"


class DeltaFallback(SynvirtError):
    """What has changed is not known for certain: the whole disk is read."""

    code = "E_BAK_DELTA_FALLBACK"


class RepositoryUnreachable(SynvirtError):
    """The repository cannot be reached or used."""

    code, status = "E_BAK_REPOSITORY_UNREACHABLE", 502


class RepositoryFull(SynvirtError):
    """The repository has no room left."""

    code = "E_BAK_REPOSITORY_FULL"


class RepositoryKeyWrong(SynvirtError):
    """The key or passphrase is wrong for this repository."""

    code, status = "E_BAK_KEY_WRONG", 400


class RepositoryDamaged(DiskReadFailed):
    """Something in the repository is missing, or not what was written."""

    code = "E_BAK_DAMAGED"


class BackupBusy(SynvirtError):
    """Too many requests are being served now; try again in a moment."""

    code, status = "E_BAK_BUSY", 429


class BackupImmutable(Conflict):
    """The object is protected: it cannot be changed or removed now."""

    code = "E_BAK_IMMUTABLE"


class StoreWriteFailed(SynvirtError):
    """The repository could not be written."""

    code = "E_BAK_STORE_WRITE_FAILED"


class BackupDiskWriteFailed(DiskWriteFailed):
    """A disk could not be written during a restore."""

    code = "E_BAK_DISK_WRITE_FAILED"


class BackupCancelled(Cancelled):
    """The operator cancelled the run."""

    code = "E_BAK_CANCELLED"


class BackupInternal(Internal):
    """Something went wrong inside the service during a backup operation."""

    code = "E_BAK_INTERNAL"


class HostLacks(Conflict):
    """This host lacks something that the guest's domain needs."""

    code = "E_BAK_HOST_LACKS"


class BootTestFailed(SynvirtError):
    """The restored guest did not boot."""

    code = "E_BAK_BOOT_TEST_FAILED"


class Interrupted(SynvirtError):
    """The service or its host ended while the run was under way."""

    code = "E_BAK_INTERRUPTED"


def not_listed(noun: str, id_: object, kind: type[NotFound] = NotFound) -> NotFound:
    """For an id that the list of its kind does not have: «there is no backup job 7»."""
    if noun == "upload":  # these go by themselves
        return UploadNotFound(f"there is no {noun} {id_}", hint="it expired or was removed: upload the file again")
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return kind(f"there is no {noun} {id_}", hint=f"the list of {many} shows those there are")


# Deeper than any library wraps an error.
_WRAPPED_MAX = 8


def cause_of(error: BaseException) -> str:
    """What the system reports about an error, without Python's own words: «Connection refused»."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def root_cause_of(error: BaseException) -> str:
    """The innermost error's words: libraries wrap the system's in their own, and add the names of their objects. An error of a
    library's own has its name too: «BadStatusLine: SSH-2.0»."""
    inner = error
    for _ in range(_WRAPPED_MAX):
        following = inner.__cause__ or inner.__context__
        if following is None:
            break
        inner = following
    if isinstance(inner, OSError):
        return getattr(inner, "verify_message", None) or cause_of(inner)
    return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__


def _with_subclasses(root: type[SynvirtError]) -> list[type[SynvirtError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _with_subclasses(child))]


# One class for each code, which has it itself. Where several have it (an upload too large, or wrong), the last one.
BY_CODE: dict[str, type[SynvirtError]] = {cls.code: cls for cls in _with_subclasses(SynvirtError) if "code" in vars(cls)}


def from_code(code: str, detail: str, hint: str | None = None) -> SynvirtError:
    """The error class of a code that a worker process reported. An unknown code gives Internal."""
    return BY_CODE.get(code, Internal)(detail, hint=hint)


def unreadable(path: "Path", error: OSError, *, what: str = "") -> BadRequest:
    """For a file that a person named and that cannot be read: the nearest name is the hint. `what`: words before its name."""
    from synvirt.nearest import hint_for  # a command without errors does not need it

    return BadRequest(f"{what}{path} cannot be read: {error.strerror}", hint=hint_for(path, error))


# Documents and keys that people name are far smaller; /dev/zero has no end.
NAMED_BYTES_MAX = 64 << 20


def content_of(path: "Path", *, what: str = "") -> bytes:
    """All of a file that a person named. BadRequest, if it cannot be read or is larger than NAMED_BYTES_MAX. `what`: words
    before its name."""
    try:
        with path.open("rb") as file:
            content = file.read(NAMED_BYTES_MAX + 1)
    except OSError as error:
        raise unreadable(path, error, what=what) from error
    if len(content) > NAMED_BYTES_MAX:
        raise BadRequest(f"{what}{path} is larger than {NAMED_BYTES_MAX >> 20} MiB: another file is meant")
    return content


def text_of(path: "Path", *, what: str = "") -> str:
    """The same as a text in UTF-8. BadRequest, if it is none."""
    try:
        return content_of(path, what=what).decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{what}{path} is not a text in UTF-8") from error
