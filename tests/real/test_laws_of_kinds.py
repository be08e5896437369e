"""Each law, of each kind of job that needs a hypervisor, at each of its moments: tests/kinds has the table."""

from pathlib import Path

import pytest

from synvirt.hypervisor.libvirt_host import LibvirtHost
from tests.kinds.laws import LAWS, Kind, Place, cases, holds
from tests.kinds.table import KINDS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "law", "part"), cases(KINDS, real=True))
def test_law(kind: Kind, law: str, part: int, tmp_path: Path, host: LibvirtHost, data_dir: Path) -> None:
    holds(LAWS[law], kind, part, lambda name: Place(tmp_path / name, host=host, data_dir=data_dir))
