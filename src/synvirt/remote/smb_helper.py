"""A process of its own that reads files of one SMB share by Samba's libsmbclient, four times as fast as Python's SMB.

smb_native starts it, by its path: it imports nothing of the service. GPL-3 libsmbclient is loaded only here.

    argv   the descriptor of the shared memory for the bytes, its size
    stdin  a length, and a text of that length: host, port, share, domain, user, password, whether others may not write
           meanwhile; NULs between. Then requests: (offset in the file, place in the memory, count, length of the path), path
    stdout one (status, count) for each: 0 and the number of bytes, or an errno; the first one reports the start
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

# Imports cost time, and a process is started for each lane: it imports only what it needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LENGTH, QUESTION, ANSWER = struct.Struct("<I"), struct.Struct("<QQQI"), struct.Struct("<iQ")
PATH_BYTES_MAX = 1 << 15
# A chain of checkpoints has 50 files.
OPEN_MAX = 64
DENY_WRITE, DENY_NONE = 2, 4
NO_LIBRARY = 3
TIMEOUT_MS = 30_000
_LOGIN = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_char), ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_int,
    ctypes.POINTER(ctypes.c_char), ctypes.c_int,
)  # fmt: skip


class Share:
    """One share, by libsmbclient."""

    def __init__(self, library: Any, place: list[bytes]) -> None:
        host, port, share, *texts, deny_write = place
        self._root = b"smb://%b/%b/" % (host, _quoted(share))

        def login(_context: int, _server: bytes, _share: bytes, *fields: Any) -> None:
            for text, at in zip(texts, (0, 2, 4), strict=True):
                ctypes.memmove(fields[at], text[: fields[at + 1] - 1] + b"\0", min(len(text), fields[at + 1] - 1) + 1)

        # The library stores only its address, so we keep the object.
        self._login = _LOGIN(login)
        library.smbc_new_context.restype = ctypes.c_void_p
        context = library.smbc_new_context()
        library.smbc_setConfiguration.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        for name, value in (
            ("smbc_setDebug", 0),
            ("smbc_setOptionDebugToStderr", 1),
            ("smbc_setPort", int(port)),
            ("smbc_setTimeout", TIMEOUT_MS),
            ("smbc_setOptionOpenShareMode", DENY_WRITE if deny_write else DENY_NONE),
            ("smbc_setOptionNoAutoAnonymousLogin", 1),
        ):
            setter = getattr(library, name)
            setter.argtypes = [ctypes.c_void_p, ctypes.c_int]
            setter(context, value)
        library.smbc_setOptionProtocols.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        library.smbc_setFunctionAuthDataWithContext.argtypes = [ctypes.c_void_p, _LOGIN]
        library.smbc_setFunctionAuthDataWithContext(context, self._login)
        library.smbc_init_context.restype, library.smbc_init_context.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        if not library.smbc_init_context(context):
            raise OSError(ctypes.get_errno(), "libsmbclient does not begin")
        # None of this host's smb.conf, which may allow insecure dialects.
        library.smbc_setConfiguration(context, b"/dev/null")
        library.smbc_setOptionProtocols(context, b"SMB2_02", b"SMB3_11")
        self._context = context
        self._open = _function(library, context, "Open", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
        self._close = _function(library, context, "Close", ctypes.c_int, ctypes.c_void_p)
        self._seek = _function(library, context, "Lseek", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._read = _function(library, context, "Read", ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._files: dict[bytes, int] = {}

    def read_into(self, path: bytes, offset: int, address: int, count: int) -> int:
        """The number of bytes that were read: fewer only at the file's end. OSError."""
        file = self._files.get(path)
        if file is None:
            if len(self._files) >= OPEN_MAX:
                self._close(self._context, self._files.pop(next(iter(self._files))))  # the oldest
            file = self._open(self._context, self._root + _quoted(path), os.O_RDONLY, 0)
            if not file:
                raise OSError(ctypes.get_errno(), "open")
            self._files[path] = file
        if self._seek(self._context, file, offset, os.SEEK_SET) != offset:
            raise OSError(ctypes.get_errno(), "seek")
        got = 0
        while got < count:
            part = self._read(self._context, file, address + got, count - got)
            if part < 0:
                raise OSError(ctypes.get_errno(), "read")
            if part == 0:
                break
            got += part
        return got


def _quoted(path: bytes) -> bytes:
    """Quoted for a URL, except slashes."""
    return b"".join(b"/" if byte == 0x2F else b"%%%02X" % byte for byte in path)


def _function(library: Any, context: int, name: str, answer: Any, *arguments: Any) -> Callable[..., Any]:
    getter = getattr(library, f"smbc_getFunction{name}")
    getter.argtypes, getter.restype = [ctypes.c_void_p], ctypes.CFUNCTYPE(answer, ctypes.c_void_p, *arguments, use_errno=True)
    found: Callable[..., Any] = getter(context)
    return found


def main() -> int:
    """The helper as a process. Exit NO_LIBRARY: libsmbclient is not installed."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        library = ctypes.CDLL("libsmbclient.so.0", use_errno=True)
    except OSError:
        return NO_LIBRARY
    (length,) = LENGTH.unpack(questions.read(LENGTH.size))
    share = Share(library, questions.read(length).split(b"\0"))
    memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    answers.write(ANSWER.pack(0, 0))
    answers.flush()
    while len(asked := questions.read(QUESTION.size)) == QUESTION.size:
        offset, at, count, length = QUESTION.unpack(asked)
        if length > PATH_BYTES_MAX or at + count > len(memory):
            return 2
        path = questions.read(length)
        try:
            status, got = 0, share.read_into(path, offset, address + at, count)
        except OSError as error:
            status, got = error.errno or 5, 0
        answers.write(ANSWER.pack(status, got))
        answers.flush()
    return 0


if __name__ == "__main__":
    # The library leaves threads and connections open. A process that only reads need not clean up.
    os._exit(main())
