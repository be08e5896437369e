"""Servers for the tests of what connects to them."""

from collections.abc import Iterator

import pytest

from tests.servers.remote_servers import Certificates, certificates
from tests.transport.http_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(made: Certificates) -> Iterator[Server]:
    server = Server(made)
    yield server
    server.close()
