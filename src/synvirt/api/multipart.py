"""multipart/form-data (RFC 7578) with one file, as it comes: pieces in, the file's bytes out, nothing kept.

The framework's own parser first writes the file to a temporary one, before it can be refused; this parser passes each piece on
at once. It knows two parts: `file`, and `sha256`, before or after it. Blocking code: `feed` is called in a thread, one at a
time.
"""

import re
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from synvirt.errors import BadRequest, UnsupportedMediaType, UploadTooLarge
from synvirt.migrations.uploads import too_large
from synvirt.sizes import KIB

# The body without the file: boundaries, headers, the digest, and what some clients send before and after.
FRAMING_BYTES = 64 * KIB
PARTS_MAX = 8
DIGEST_PART_BYTES = 256
# Content-Disposition and Content-Type; a file name may be 255 characters, each escaped.
HEADERS_MAX, HEADER_BYTES = 8, 8 * KIB

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_HINT = "send multipart/form-data with the part `file` and, optionally, `sha256`: curl -F file=@web.ova"
# What browsers escape in a file name (WHATWG HTML, «multipart/form-data encoding algorithm»).
_ESCAPES = {"%22": '"', "%0D": "\r", "%0A": "\n"}
# RFC 5987: filename*=UTF-8''web%20%C3%BC.ova, in a header whose quoted texts were taken out.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_EXTENDED = re.compile(r";\s*filename\*\s*=\s*(utf-8|iso-8859-1)'[^';]*'([^\s;]*)", re.I)


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sink(Protocol[T_co]):
    """The target of the file: migrations/uploads.py's Incoming, or memory."""

    def write(self, data: memoryview) -> None: ...
    def finish(self, announced_sha256: str | None) -> T_co: ...
    def discard(self) -> None: ...


class UploadForm(Generic[T]):
    """`feed` the body in pieces of any size, `finish` at its end, `discard` in any case: only a finished file stays."""

    def __init__(
        self, content_type: str, *, cap_bytes: int, begin: Callable[[str], Sink[T]], blank_sha256: bool = False
    ) -> None:
        """`blank_sha256`: an empty digest counts as none."""
        self._begin, self._cap_bytes, self._blank_sha256 = begin, cap_bytes, blank_sha256
        self._body_bytes = 0
        self._parts = 0
        self._name = ""
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[str, str] = {}
        self._announced = bytearray()
        self._sha256: str | None = None
        self._sink: Sink[T] | None = None
        self._ended = self._closed = False
        # Of the file: a form without a chosen file sends neither.
        self._named = self._filled = False
        # When the service ends, `discard` is called while a piece may still be written to the disk.
        self._lock = threading.Lock()
        self._parser = _parser(content_type, self)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body. BadRequest for a malformed one, UploadTooLarge over the cap."""
        with self._lock:
            self._body_bytes += len(data)
            if self._body_bytes > self._cap_bytes + FRAMING_BYTES:
                raise too_large(self._cap_bytes)
            if self._closed:
                raise BadRequest("the upload was aborted")
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise BadRequest(f"the body is not multipart/form-data: {error}", hint=_HINT) from error

    def finish(self) -> T:
        """The sink's result, after the body has ended. BadRequest, if it is incomplete."""
        with self._lock:
            if not self._ended:
                raise BadRequest("the body ends before its last boundary: the upload was cut off", hint="send the file again")
            if self._sink is None:
                raise BadRequest("the part `file` is missing", hint=_HINT)
            if not (self._named or self._filled):
                raise BadRequest("no file was chosen: the part `file` has no name and no bytes", hint=_HINT)
            if not self._filled:
                raise BadRequest("the file is empty", hint="check the original file, and send it again")
            upload = self._sink.finish(self._sha256)
            self._closed = True
            return upload

    def discard(self) -> None:
        """Gives the upload up, and removes its data. It may be called twice."""
        with self._lock:
            if self._sink is not None and not self._closed:
                self._sink.discard()
            self._closed = True

    # ── the parser's callbacks ───────────────────────────────────────────────────────────────────────────────────────

    def on_part_begin(self) -> None:
        """The parser's callback: a part begins."""
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"the body has over {PARTS_MAX} parts", hint=_HINT)
        self._headers = {}

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """The parser's callback: a header of the part is complete."""
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._field, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        """The parser's callback: the headers of a part are complete. BadRequest for an unknown part."""
        disposition, options = parse_options_header(self._headers.get("content-disposition", ""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        encoding = self._headers.get("content-transfer-encoding", "binary").strip().lower()
        if disposition != b"form-data" or encoding not in ("binary", "8bit", "7bit"):
            raise BadRequest("a part is not form-data in plain bytes", hint=_HINT)
        match self._name:
            case "file" if self._sink is None:
                name = _filename(options.get(b"filename", b"")) or _extended(self._headers.get("content-disposition", ""))
                self._named = bool(name)
                self._sink = self._begin(name)
            case "sha256" if self._sha256 is None and not self._announced:
                pass
            case "file" | "sha256":
                raise BadRequest(f"the part `{self._name}` occurs twice", hint="upload one file per request")
            case _:
                raise BadRequest(f"the part {self._name[:100]!r} is not known", hint=_HINT)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """The parser's callback: bytes `start … end` of `data` belong to the part."""
        if self._name == "file" and self._sink is not None:
            self._filled = self._filled or end > start
            self._sink.write(memoryview(data)[start:end])
        else:
            self._announced += data[start:end]
            if len(self._announced) > DIGEST_PART_BYTES:
                raise BadRequest("sha256: is longer than a digest", hint=_HINT)

    def on_part_end(self) -> None:
        """The parser's callback: the part is complete. BadRequest for an invalid digest."""
        if self._name == "sha256":
            self._sha256 = self._announced.decode("latin-1").strip()
            if self._blank_sha256 and not self._sha256:
                self._sha256 = None
            elif not _SHA256.fullmatch(self._sha256):
                raise BadRequest("sha256: is not 64 hexadecimal digits", hint="sha256sum FILE prints them")

    def on_end(self) -> None:
        self._ended = True


def refuse_length(content_length: str | None, cap_bytes: int) -> int:
    """The announced length of the body (0: none). A length over the cap is refused before a byte is read."""
    if content_length is None or not content_length.isdecimal():
        return 0
    if len(content_length) > 19 or int(content_length) > cap_bytes + FRAMING_BYTES:
        raise _announced_too_large(content_length[:40], cap_bytes)
    return int(content_length)


def _announced_too_large(length: str, cap_bytes: int) -> UploadTooLarge:
    refusal = too_large(cap_bytes)
    return UploadTooLarge(f"{refusal.detail}: its request has {length} bytes", hint=refusal.hint)


def _parser(content_type: str, form: UploadForm[Any]) -> MultipartParser:
    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not boundary:
        shown = repr(content_type[:100]) if content_type else "missing"
        raise UnsupportedMediaType(
            f"the body's Content-Type is {shown}; it must be multipart/form-data with a boundary", hint=_HINT
        )
    names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "part_end", "end")
    callbacks = {f"on_{name}": getattr(form, f"on_{name}") for name in names}
    try:
        return MultipartParser(boundary, callbacks, max_header_count=HEADERS_MAX, max_header_size=HEADER_BYTES)  # type: ignore[arg-type]
    except FormParserError as error:
        raise BadRequest(f"the body's boundary is not valid: {error}", hint=_HINT) from error


def _extended(disposition: str) -> str:
    """The name in `filename*`, "" where there is none. RFC 7578 forbids it in a form, and some libraries send nothing else for
    a name that is not ASCII."""
    found = _EXTENDED.search(_QUOTED.sub('""', disposition))
    return "" if found is None else unquote_to_bytes(found[2]).decode(found[1], errors="replace")


def _filename(raw: bytes) -> str:
    name = raw.decode(errors="replace")
    for escaped, character in _ESCAPES.items():
        name = name.replace(escaped, character)
    return name
