"""pyvmomi's own connections, with a limit on each answer; a recorder gets each answer too (`sources record`).

pyvmomi has no hook for a listener: its stub takes an HTTP connection, sends the request, and reads the answer from it
(SoapAdapter.SoapStubAdapter.InvokeMethod). This connection reads the whole answer first.
"""

import io
from typing import Any, Final

from synvirt.errors import SourceUnreachable
from synvirt.http_answers import Response
from synvirt.transport import Answer, AnswerTooLarge, Recorder, https

# A page of 500 VMs has some MiB. An endless answer must not fill the memory: pyvmomi makes objects of it while it comes, which
# take ten times as much.
_ANSWER_MAX: Final = 64 << 20


class Bounded(Response):
    """An answer of at most _ANSWER_MAX bytes. One that is packed is refused, as a thousandth of that would be enough."""

    def begin(self) -> None:
        super().begin()
        self._left = _ANSWER_MAX
        if (packed := self.headers.get("content-encoding", "identity")) != "identity":
            raise SourceUnreachable(f"an answer is packed by {packed[:40]!r}, which was not asked for")

    def read(self, amt: int | None = None) -> bytes:
        """Reads as http.client does, within the limit. AnswerTooLarge."""
        found = super().read(self._left + 1 if amt is None else amt)
        self._left -= len(found)
        if self._left < 0:
            raise AnswerTooLarge(f"an answer has more than {_ANSWER_MAX >> 20} MiB")
        return found


class Connection(https.Connection):
    """The `scheme` of pyvmomi's stub."""

    response_class = Bounded


def tapped(stub: Any, recorder: Recorder) -> Any:
    """The class `stub`, a SoapStubAdapter, which also gives all its answers to the recorder. Create it with
    acceptCompressedResponses=False, as the raw answer is recorded."""

    class Tapped(stub):  # type: ignore[misc]
        def GetConnection(self) -> "_Connection":  # noqa: N802 - pyvmomi's name
            return _Connection(super().GetConnection(), recorder)

        def ReturnConnection(self, conn: "_Connection") -> None:  # noqa: N802
            super().ReturnConnection(conn.inner)

    return Tapped


class _Connection:
    """The methods of HTTPConnection that InvokeMethod calls."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self.inner, self._recorder = inner, recorder
        self._asked: tuple[str, str, bytes] = ("", "", b"")

    def request(self, method: str, path: str, sent: bytes | str, headers: dict[str, str]) -> None:
        self._asked = (method, path, sent.encode() if isinstance(sent, str) else sent)
        self.inner.request(method, path, sent, headers)

    def getresponse(self) -> "_Response":
        found = self.inner.getresponse()
        body = found.read()
        method, path, sent = self._asked
        headers = {"content-type": found.getheader("Content-Type", "")}
        self._recorder.answered(method, path, {}, sent, Answer(found.status, headers, body, found.reason))
        return _Response(found, body)

    def close(self) -> None:
        self.inner.close()


class _Response(io.BytesIO):
    """The answer, to be read again."""

    def __init__(self, found: Any, body: bytes) -> None:
        super().__init__(body)
        self.status, self.reason, self.getheader = found.status, found.reason, found.getheader
