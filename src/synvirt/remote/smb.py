r"""Files of SMB shares (MS-SMB2, dialects 2.0.2 to 3.1.1), by the library smbprotocol: no mount, no root, no kernel module.

    smb://DOMAIN;user@nas.example/share/folder/vm.vmx      the domain may also be in the credentials

A file is opened so that others may read but not write it: all reads see one version. If the connection breaks, it is opened
again, and must have the same size and date as before.

Large pieces come through Samba's own client where this host has it (smb_native), four times as fast. The library's open file
protects them from changes.
"""

import contextlib
import errno
import struct
import threading
import unicodedata
import uuid
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import smbprotocol.connection
import smbprotocol.exceptions as smb
from smbprotocol import MAX_PAYLOAD_SIZE
from smbprotocol.connection import Connection
from smbprotocol.file_info import FileInformationClass
from smbprotocol.open import (
    CreateDisposition,
    CreateOptions,
    FileAttributes,
    FilePipePrinterAccessMask,
    ImpersonationLevel,
    Open,
    ShareAccess,
    SMB2ReadResponse,
)
from smbprotocol.session import Session
from smbprotocol.transport import Tcp
from smbprotocol.tree import TreeConnect

from synvirt.errors import (
    AuthFailed,
    BadRequest,
    DiskReadFailed,
    MalformedArchive,
    NotFound,
    SourceUnreachable,
    SynvirtError,
    root_cause_of,
)
from synvirt.outgoing import CONNECT_TIMEOUT_S
from synvirt.remote import Interrupted, Remote, urls, version_by
from synvirt.remote.smb_native import FAILURES_MAX, WORTH_BYTES, NativeShare
from synvirt.sizes import MIB

READ_TIMEOUT_S: Final = 30.0
# A server that says nothing for so long, while a file is opened or a folder listed, is asked whether it is there, and is given
# up when it says nothing for so long again. The library's own limit is ten minutes.
SILENCE_S: Final = 30
# For a whole login: the server may ask a domain controller. The library sets no limit.
LOGIN_TIMEOUT_S: Final = 60.0
# The size of one request; servers allow up to 8 MiB. Each costs one credit per 64 KiB.
REQUEST_BYTES: Final = MIB
_CREDITS_WANTED: Final = 256
# A folder of an appliance in chunks has thousands of files.
_ENTRIES_MAX: Final = 100_000

_NOT_THERE: Final = (
    smb.ObjectNameNotFound,
    smb.ObjectPathNotFound,
    smb.NoSuchFile,
    smb.BadNetworkName,
    smb.ObjectNameInvalid,
    smb.ObjectPathSyntaxBad,
)
_REFUSED: Final = (
    smb.SMBAuthenticationError,
    smb.LogonFailure,
    smb.AccessDenied,
    smb.WrongPassword,
    smb.PasswordExpired,
)
_BROKEN: Final = (smb.SMBConnectionClosed, OSError, TimeoutError, struct.error)
_NOT_THERE_HINT: Final = "check the name of the share and the path; smb://HOST/SHARE/FOLDER/FILE"
_REFUSED_HINT: Final = "check username, password and domain, and that this user may read the share"


class _BoundedTcp(Tcp):  # type: ignore[misc]
    """MS-SMB2 section 2.1: the length of a message has three bytes, and the byte before them is zero. The library reads all
    four as the length and makes a buffer of that size: four bytes from any server cost up to 4 GiB."""

    def _recv(self, length: int, timeout: float) -> Any:
        if length > self.MAX_SIZE:
            raise OSError(errno.EPROTO, "what answers is not an SMB server")
        return super()._recv(length, timeout)


# The library gives no way to choose its transport class.
smbprotocol.connection.Tcp = _BoundedTcp


class _Connection(Connection):  # type: ignore[misc]
    """A connection that a silent server does not hold up."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(uuid.uuid4(), address, port)
        self._receive_timeout = SILENCE_S

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """The connection ends where the block takes longer, and then so does the block."""
        timer = threading.Timer(limit_s, _disconnect, [self])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class SmbPlace:
    """A folder of an SMB share."""

    # The library is pure Python: more requests at once do not make it faster, but hide the network's delay.
    fetches_at_once = 4

    def __init__(self, remote: Remote) -> None:
        url = urls.parse(remote.url)
        self._remote, self._host, self._port, self._origin = remote, url.host, url.port, url.origin
        share, _, folder = unquote(url.path).strip("/").partition("/")
        if not share:
            raise BadRequest("the URL names no share", hint="smb://HOST/SHARE/FOLDER/FILE")
        self._share, self._folder = share, folder
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._tree: TreeConnect | None = None
        self._closed = False
        self._native: NativeShare | None = None
        self._natives_lost = 0
        self.request_bytes = MAX_PAYLOAD_SIZE

    def open(self, name: str) -> "SmbFile":
        return SmbFile(self, f"{self._folder}/{name}".strip("/"))

    def names(self, folder: str) -> list[str]:
        path = f"{self._folder}/{folder}".strip("/")
        handle = self.handle(path, folder=True)
        tree = handle.tree_connect
        found: list[str] = []
        try:
            while True:
                try:
                    page = handle.query_directory("*", FileInformationClass.FILE_NAMES_INFORMATION, 0)
                except smb.NoMoreFiles:
                    break
                found += [entry["file_name"].get_value().decode("utf-16-le", "surrogatepass") for entry in page]
                if len(found) > _ENTRIES_MAX:
                    raise MalformedArchive(f"{self.shown(path)} has over {_ENTRIES_MAX} entries; no VM has")
            handle.close()
        except (smb.SMBException, *_BROKEN) as error:
            raise self.translated(error, path, tree=tree) from error
        return [f"{folder}/{name}" if folder else name for name in found if name not in (".", "..")]

    def shown(self, path: str) -> str:
        return f"{self._origin}/{self._share}/{path}"

    def refuse_no_name(self, path: str) -> None:
        """NotFound, where no file on a share has that name."""
        # A backslash would lead elsewhere: names come from images and descriptions, and must not leave the folder.
        # Control characters and halves of surrogate pairs: a share has all others, also blanks of other scripts.
        if "\\" in path or any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
            raise NotFound(f"{self.shown(repr(path[:200])[1:-1])} is not a name on a share", hint=_NOT_THERE_HINT)

    def handle(self, path: str, *, folder: bool = False) -> Open:
        """An open file or folder. NotFound, AuthFailed, Interrupted."""
        self.refuse_no_name(path)
        tree = None
        try:
            tree = self.tree()
            try:
                return self._created(tree, path, ShareAccess.FILE_SHARE_READ, folder=folder)
            except smb.SharingViolation:
                if not self._remote.frozen:
                    raise
            return self._created(tree, path, ShareAccess.FILE_SHARE_READ | ShareAccess.FILE_SHARE_WRITE, folder=folder)
        except (smb.SMBException, *_BROKEN) as error:
            raise self.translated(error, path, tree=tree) from error

    def _created(self, tree: TreeConnect, path: str, shared: int, *, folder: bool) -> Open:
        handle = Open(tree, path.replace("/", "\\"))
        handle.create(
            ImpersonationLevel.Impersonation,
            FilePipePrinterAccessMask.GENERIC_READ,
            FileAttributes.FILE_ATTRIBUTE_NORMAL,
            shared,
            CreateDisposition.FILE_OPEN,
            CreateOptions.FILE_DIRECTORY_FILE if folder else CreateOptions.FILE_NON_DIRECTORY_FILE,
        )
        return handle

    def tree(self) -> TreeConnect:
        """The share's connection: made once, and again after it broke."""
        with self._lock:
            if self._closed:
                raise SourceUnreachable(f"{self._origin} was closed while it was read")
            if self._tree is None:
                self._connection = self._reached()
                try:
                    with self._connection.within(LOGIN_TIMEOUT_S):
                        self._tree = self._logged_in(self._connection)
                    self._native = self._faster(self._connection.server_name)
                except BaseException:
                    _disconnect(self._connection)
                    raise
            return self._tree

    @property
    def connected(self) -> TreeConnect | None:
        """The share's connection; None, where there is none now."""
        with self._lock:
            return self._tree

    def native(self) -> NativeShare | None:
        """Samba's own client for this share, at the connection's address; None, where there is none."""
        with self._lock:
            return self._native

    def _reached(self) -> _Connection:
        """Connects to its addresses, in turn. They are checked, and no name server is asked again."""
        failure: Exception | None = None
        for address in self._remote.guard.addresses(self._host, self._port):
            connection = _Connection(address, self._port)
            try:
                connection.connect(timeout=CONNECT_TIMEOUT_S)
            except ValueError as error:  # the library raises it for an address that does not answer
                failure = error
            except BaseException:
                _disconnect(connection)
                raise
            else:
                return connection
        raise SourceUnreachable(
            f"{self._origin}, port {self._port}, does not answer: {failure.__cause__ if failure else 'no SMB server'}",
            hint="does it run, and do firewalls let this host connect to it?",
        ) from failure

    def _faster(self, address: str) -> NativeShare | None:
        """Samba's client, only for a login by name and password. Guests and Kerberos tickets for a name need the library."""
        remote = self._remote
        user = remote.credential("username")
        if not user or not remote.credential("password") or self._natives_lost >= FAILURES_MAX:
            return None
        return NativeShare(
            address,
            self._port,
            self._share,
            user=user,
            password=remote.credential("password"),
            domain=remote.credential("domain"),
            deny_write=not remote.frozen,
        )

    def _logged_in(self, connection: Connection) -> TreeConnect:
        remote = self._remote
        user, domain = remote.credential("username"), remote.credential("domain")
        session = Session(
            connection,
            username=f"{domain}\\{user}" if domain else user or "guest",
            password=remote.credential("password"),
            # Required encryption would exclude guests, whose sessions cannot be encrypted.
            require_encryption=False,
            hostname_override=self._host,
        )
        session.connect()
        tree = TreeConnect(session, f"\\\\{self._host}\\{self._share}")
        tree.connect(require_secure_negotiate=bool(user))
        # Requests cost credits, one per 64 KiB. A server gives a few at first, and may give fewer than asked.
        connection.echo(sid=session.session_id, credit_request=_CREDITS_WANTED)
        window = connection.sequence_window
        share = max(1, (window["high"] - window["low"]) // (self.fetches_at_once + 1))
        self.request_bytes = min(share * MAX_PAYLOAD_SIZE, REQUEST_BYTES, connection.max_read_size)
        return tree

    def broken(self, tree: TreeConnect) -> None:
        """The next request connects again. Another fetch that saw the same break may have connected already: that new
        connection stays, or the fetches would break each other's forever."""
        with self._lock:
            if self._tree is not tree:
                return
            connection, self._connection, self._tree = self._connection, None, None
            native, self._native = self._native, None
        if native is not None:
            self._natives_lost += native.lost
            native.close()
        if connection is not None:
            _disconnect(connection)

    def translated(
        self, error: Exception, path: str, offset: int | None = None, *, tree: TreeConnect | None
    ) -> SynvirtError | Interrupted:
        """`tree`: the share's connection; None, where there is none."""
        where = self.shown(path) + ("" if offset is None else f", offset {offset}")
        if isinstance(error, (SynvirtError, Interrupted)):
            return error
        if isinstance(error, _NOT_THERE):
            return NotFound(f"{where} is not there", hint=_NOT_THERE_HINT)
        if isinstance(error, _REFUSED):
            return AuthFailed(f"{where}: the server refused the login or the access", hint=_REFUSED_HINT)
        if isinstance(error, smb.SharingViolation):
            return DiskReadFailed(
                f"{where} is open for writing elsewhere", hint="shut the machine down, or let the copy that writes it end"
            )
        if isinstance(error, smb.FileIsADirectory):
            return NotFound(f"{where} is a folder, not a file", hint="give the URL of the file that describes the machine")
        if tree is not None:
            self.broken(tree)
        return Interrupted(root_cause_of(error)[:200])

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if (tree := self.connected) is not None:
            self.broken(tree)


class SmbFile:
    """A file, at the version that it had when it was opened."""

    head = b""

    def __init__(self, place: SmbPlace, path: str) -> None:
        self._place, self._path = place, path
        self._lock = threading.Lock()
        self._handle: Open | None = place.handle(path)
        self.shown = place.shown(path)
        self.size, self.version = _identity(self._handle)

    def fetch(self, offset: int, into: memoryview) -> None:
        handle = self._opened(offset)
        got = self._natively(handle.tree_connect, offset, into)
        try:
            while got < len(into):
                content = _read(handle, offset + got, min(len(into) - got, self._place.request_bytes))
                into[got : got + len(content)] = content
                got += len(content)
        except smb.EndOfFile as error:
            raise DiskReadFailed(
                f"{self.shown} ends before offset {offset + got}, but was longer when it was opened"
            ) from error
        except (smb.SMBException, *_BROKEN) as error:
            with self._lock:
                if self._handle is handle:
                    self._handle = None
            found = self._place.translated(error, self._path, offset + got, tree=handle.tree_connect)
            if isinstance(found, Interrupted):
                found.got = got
            raise found from error

    def _natively(self, tree: TreeConnect, offset: int, into: memoryview) -> int:
        """How many bytes of a large piece came through Samba's own client; the library reads the rest."""
        native, got = self._place.native(), 0
        while native is not None and len(into) - got >= WORTH_BYTES:
            part = native.read(self._path, offset + got, into[got:])
            if native.lost:
                self._place.broken(tree)
                raise Interrupted("the process that reads by libsmbclient ended", got=got)
            if not part:
                break
            got += part
        return got

    def _opened(self, offset: int) -> Open:
        """The handle, which is opened again after the connection broke, and then of the same file."""
        with self._lock:
            if self._handle is None or self._handle.tree_connect is not self._place.tree():
                handle = self._place.handle(self._path)
                if _identity(handle) != (self.size, self.version):
                    raise DiskReadFailed(
                        f"{self.shown} was changed or replaced while it was read, at offset {offset}",
                        hint="let it be written to its end first, then submit again",
                    )
                self._handle = handle
            return self._handle

    def close(self) -> None:
        """The handles end with the connection."""


def _identity(handle: Open) -> tuple[int, str]:
    size = int(handle.end_of_file)
    # No creation time: Samba computes one from the others where its file system has none.
    return size, version_by(size, handle.last_write_time)


def _read(handle: Open, offset: int, length: int) -> bytes:
    """Like `Open.read`, which could wait for its answer forever."""
    request, _ = handle.read(offset, length, send=False)
    tree = handle.tree_connect
    sent = handle.connection.send(request, tree.session.session_id, tree.tree_connect_id)
    answer = SMB2ReadResponse()
    answer.unpack(handle.connection.receive(sent, timeout=READ_TIMEOUT_S)["data"].get_value())
    content: bytes = answer["buffer"].get_value()
    if not content:
        raise smb.EndOfFile
    return content


def _disconnect(connection: Any) -> None:
    """Closes only the socket, which ends its thread: the library would wait for answers when it logs off."""
    with contextlib.suppress(Exception):  # whatever a broken connection raises, it is gone
        connection.disconnect(close=False)
