"""Fixtures of a Prism: `cluster` alone, `by_nfs` and `by_iscsi` with the servers of its bytes. Imported by conftest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.prism.iscsi import iscsi_target
from tests.fakes.prism.nfs import nfs_server
from tests.fakes.prism.server import Prisms, prisms

HERE = "127.0.0.1/255.255.255.255"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Prisms]:
    with prisms(tmp_path / "prism") as running:
        yield running
    assert running.mistakes == []


@pytest.fixture
def by_nfs(tmp_path: Path, cluster: Prisms) -> Iterator[Prisms]:
    """This host is on the cluster's list."""
    cluster.state.cluster_list.append(HERE)
    with nfs_server(tmp_path / "nfs", cluster.state) as ports:
        cluster.nfs_ports = ports
        yield cluster


@pytest.fixture
def by_iscsi(tmp_path: Path, cluster: Prisms) -> Iterator[Prisms]:
    with iscsi_target(tmp_path / "iscsi", cluster.state) as portal:
        cluster.portal = portal
        yield cluster
