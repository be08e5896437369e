"""What the sample is made of is fetched whole or not at all."""

from pathlib import Path

import pytest

from synvirt.errors import Internal
from synvirt.programs import ProgramFailed
from synvirt.sample import pieces


@pytest.mark.parametrize("fails_at", ["apt-get", "dpkg-deb"])
@pytest.mark.parametrize("how", [ProgramFailed("apt-get", 100, "no network"), KeyboardInterrupt()])
def test_a_package_that_cannot_be_had_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException, fails_at: str
) -> None:
    def run(argv: list[str], *, timeout_s: float, cwd: Path | None = None) -> None:
        if cwd is not None:
            (cwd / "agent.deb").write_bytes(b"half")
        if argv[0] == fails_at:
            raise how

    monkeypatch.setattr(pieces, "run", run)
    with pytest.raises(KeyboardInterrupt if isinstance(how, KeyboardInterrupt) else Internal):
        pieces._fetch("agent", tmp_path / "cache" / "agent")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_module_carries_nothing_that_only_costs_an_emulated_guest_time() -> None:
    """A signed module loses its signature, and its types get a name that the kernel does not look for. Others stay."""
    signature = b"PKCS #7" * 30
    head = bytes(8) + len(signature).to_bytes(4, "big")
    signed = b"\x7fELF code\0.BTF\0.BTF_ids\0" + signature + head + b"~Module signature appended~\n"
    assert pieces.lean(signed) == b"\x7fELF code\0.btf\0.BTF_ids\0"
    assert pieces.lean(b"\x7fELF code") == b"\x7fELF code"
