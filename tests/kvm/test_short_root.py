"""The embedded driver's folder by a short path."""

import shutil
from pathlib import Path
from urllib.parse import quote

from synvirt.kvm.connection import ROOT_LIMIT_BYTES, short_root


def test_folders_can_be_made_beneath_it_before_the_driver_was_ever_opened(tmp_path: Path) -> None:
    """A boot test may be the first that asks."""
    root = tmp_path / ("long" * (ROOT_LIMIT_BYTES // 4))
    short = short_root(f"qemu:///embed?root={quote(str(root))}")
    assert short is not None
    try:
        assert len(str(short)) <= ROOT_LIMIT_BYTES
        (short / "backup/boot-tests").mkdir(parents=True)
        assert (root / "backup/boot-tests").is_dir()
        assert root.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(root)
        short.unlink()
