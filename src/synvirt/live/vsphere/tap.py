"""pyvmomi's own connections; a recorder gets each answer too (`sources record`).

pyvmomi has no hook for a listener: its stub takes an HTTP connection, sends the request, and reads the answer from it
(SoapAdapter.SoapStubAdapter.InvokeMethod). This connection reads the whole answer first.
"""

import io
from typing import Any, Final

from synvirt.errors import SourceUnreachable
from synvirt.transport import Answer, Recorder

# A page of 500 VMs has some MiB. An endless answer must not fill the memory.
_ANSWER_MAX: Final = 256 << 20


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
        body = found.read(_ANSWER_MAX + 1)
        if len(body) > _ANSWER_MAX:
            raise SourceUnreachable(f"an answer has more than {_ANSWER_MAX >> 20} MiB: it is not recorded")
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
