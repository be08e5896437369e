"""http.client's connections, through the guard (outgoing.py). For a single request, and for libraries that take a class."""

import http.client
import ssl

from synvirt import outgoing
from synvirt.http_answers import Response
from synvirt.transport.tls import CONNECT_TIMEOUT_S


class Connection(http.client.HTTPSConnection):
    """OSError from connecting, as in http.client; BadRequest, where the guard refuses the host."""

    response_class = Response

    def __init__(
        self, host: str, port: int | None = None, *, context: ssl.SSLContext, timeout: float = CONNECT_TIMEOUT_S
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._trust, self._timeout_s = context, timeout

    def connect(self) -> None:
        """Connects through the guard, and checks the certificate. SourceUnreachable."""
        plain = outgoing.sources().dial(self.host, self.port, timeout_s=self._timeout_s)
        try:
            self.sock = self._trust.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


class PlainConnection(http.client.HTTPConnection):
    """The same without TLS."""

    response_class = Response

    def __init__(self, host: str, port: int | None = None, *, timeout: float = CONNECT_TIMEOUT_S) -> None:
        super().__init__(host, port, timeout=timeout)
        self._timeout_s = timeout

    def connect(self) -> None:
        self.sock = outgoing.sources().dial(self.host, self.port, timeout_s=self._timeout_s)
