"""What is seen of a guest whose libvirtd went away in between."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from uuid import uuid4

import pytest

from synvirt.hypervisor import eyes, libvirt_host
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load


class Lost:
    """A connection that was whole when it was taken."""

    def newStream(self, flags: int) -> NoReturn:  # noqa: N802 - libvirt's own
        raise load().libvirtError("client socket is closed")


def test_a_screen_that_cannot_be_asked_for_is_no_error() -> None:
    """Else a boot test or a rehearsal that has succeeded would fail for its picture."""
    assert eyes.screenshot(Lost(), None) is None


class Watched:
    """A domain whose console says that it booted, and that has a new state at each question."""

    def __init__(self, *states: list[int]) -> None:
        self.left = list(states)

    def state(self) -> list[int]:
        return self.left.pop(0)

    def diskErrors(self) -> dict[str, int]:  # noqa: N802 - libvirt's own
        return {"vda": load().VIR_DOMAIN_DISK_ERROR_NO_SPACE}

    def XMLDesc(self) -> str:  # noqa: N802 - libvirt's own
        return '<domain><devices><disk><source dev="/dev/full"/><target dev="vda"/></disk></devices></domain>'


def test_the_state_is_asked_for_once_and_what_it_says_comes_before_the_console(tmp_path: Path) -> None:
    """A guest that is held up between two questions was said to have a broken volume."""
    libvirt = load()
    (console := tmp_path / "console").write_text("web login: ")
    held_up = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR]
    domain = Watched(held_up, [libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_CRASHED], held_up)
    seen = eyes.look(domain, console, at_s=1, resets=0)
    assert (seen.full, seen.console) == (True, "")
    seen = eyes.look(domain, console, at_s=2, resets=0)
    assert seen.trouble == "crashed and stopped"
    assert domain.left == [held_up]


def test_a_screen_that_the_disk_takes_only_half_of_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a picture was shown as the picture, and the part that was written stayed on the full disk."""
    job_id, host = uuid4(), LibvirtHost("qemu:///embed?root=/nowhere", tmp_path)
    monkeypatch.setattr(host._connection, "use", lambda: None)
    monkeypatch.setattr(eyes, "screenshot", lambda *_: bytes(64 << 10))
    monkeypatch.setattr(libvirt_host, "identity_of", lambda _: SimpleNamespace(job_id=str(job_id)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, hard))
    try:
        assert not host._keep_screenshot(SimpleNamespace(XMLDesc=str))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert host.screenshot(job_id) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
