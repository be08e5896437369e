"""Time stamps of receipts (RFC 3161): an independent authority confirms that a statement existed at a moment.

    openssl ts -query ─▶ POST (RFC 3161, section 3.4) ─▶ openssl ts -verify against the authority's roots ─▶ statement.tsr

Only the statement's SHA-256 goes out. If there is no stamp, the receipt is made without one. Blocking code.
"""

import contextlib
import http.client
import re
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import structlog

from synvirt.cage.scratch import scratch_folder
from synvirt.errors import Internal, MalformedArchive, SourceUnreachable, SynvirtError
from synvirt.programs import ProgramFailed, run
from synvirt.transport import https

log = structlog.get_logger(__name__)

# A reply with its certificates has about 5 KiB.
REPLY_BYTES_MAX: Final = 256 << 10
# From the connection to the last byte. A job that has done everything else waits for it.
ASKED_FOR_S: Final = 20.0
# After a failure, so that other jobs do not wait for nothing.
ASKED_AGAIN_AFTER_S: Final = 300.0
_OPENSSL_S: Final = 60.0
_TIME = re.compile(r"^Time stamp: (.{1,64})$", re.MULTILINE)


class TimeStamps:
    """`url`: of the authority; `roots`: a PEM file with the root certificates for its stamps."""

    def __init__(self, url: str, roots: Path) -> None:
        self._url, self._roots = url, roots
        self._not_before = float("-inf")

    def of(self, content: bytes) -> bytes | None:
        """A checked reply (TimeStampResp, DER); None, if none can be had now."""
        if time.monotonic() < self._not_before:
            return None
        try:
            return self._of(content)
        except Exception as error:  # whatever it is, the receipt is made without one
            self._not_before = time.monotonic() + ASKED_AGAIN_AFTER_S
            cause = error.detail if isinstance(error, SynvirtError) else str(error) or type(error).__name__
            log.warning("a receipt gets no time stamp", cause=cause)
            return None

    def _of(self, content: bytes) -> bytes:
        with scratch_folder("stamp") as folder:
            data, query, reply = folder / "data", folder / "query", folder / "reply"
            data.write_bytes(content)
            _openssl("-query", "-data", str(data), "-sha256", "-cert", "-out", str(query))
            reply.write_bytes(_asked(self._url, query.read_bytes()))
            # The query has a number that is used once: so the reply cannot be an older one.
            _openssl("-verify", "-queryfile", str(query), "-in", str(reply), "-CAfile", str(self._roots))
            return reply.read_bytes()


def stamped_at(content: bytes, reply: bytes, roots: Path | None) -> str:
    """When the content existed, by the authority. MalformedArchive: this is no stamp, or it is for other content, or not by an
    authority of these roots. `roots` None: the authority is not checked. Internal: openssl was ended before it knew."""
    with scratch_folder("stamp") as folder:
        (folder / "data").write_bytes(content)
        (folder / "reply").write_bytes(reply)
        try:
            if roots is not None:
                _openssl("-verify", "-data", str(folder / "data"), "-in", str(folder / "reply"), "-CAfile", str(roots))
            printed = _openssl("-reply", "-in", str(folder / "reply"), "-text")
        except ProgramFailed as error:
            if error.cut_off:
                raise Internal(f"the time stamp was not checked: openssl {error.cut_off}", hint="check it again") from error
            raise MalformedArchive(
                "the time stamp is not valid: it is for something else, or by an authority that is not trusted"
            ) from error
    found = _TIME.search(printed)
    if found is None:
        raise MalformedArchive("the time stamp has no time")
    return found[1].strip()


def _openssl(*arguments: str) -> str:
    return run(["openssl", "ts", *arguments], timeout_s=_OPENSSL_S).stdout


def _asked(url: str, query: bytes) -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not an address of a time stamp authority")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = https.Connection(parts.hostname, parts.port, timeout=ASKED_FOR_S, context=context)
    else:
        connection = https.PlainConnection(parts.hostname, parts.port, timeout=ASKED_FOR_S)
    # The connection's own limit is for each read: an authority could send a byte now and then, without end.
    watch = threading.Timer(ASKED_FOR_S, _shut, (connection,))
    watch.daemon = True
    watch.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body=query, headers={"Content-Type": "application/timestamp-query"})
        answer = connection.getresponse()
        reply = answer.read(REPLY_BYTES_MAX + 1)
    finally:
        watch.cancel()
        connection.close()
    if answer.status != http.client.OK or len(reply) > REPLY_BYTES_MAX:
        raise SourceUnreachable(f"the time stamp authority answered {answer.status}, with {len(reply)} bytes")
    return reply


def _shut(connection: http.client.HTTPConnection) -> None:
    held = connection.sock
    if held is not None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)
