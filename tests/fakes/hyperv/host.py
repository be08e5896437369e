"""A Hyper-V host put together: its control plane by TLS, its files by Samba."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt.live import SourceAccess
from synvirt.live.hyperv.journal import MARK
from tests.fakes.hyperv.model import FakeVm, HyperV
from tests.fakes.hyperv.wsman import Wsman, served
from tests.servers.remote_servers import PASSWORD, Certificates, Samba, certificates, samba

USER = "root"
DISK_BYTES = 4 << 20
EXPORTING = {"read_by": "export", "export_to": "D:\\Exports"}


@dataclass(frozen=True)
class FakeHost:
    """`files`: Samba, whose user is the host's. What drive D: is, is its share `disks`."""

    hyperv: HyperV
    wsman: Wsman
    port: int
    certificate: Certificates
    files: Samba
    folder: Path

    def access(self, *, password: str = PASSWORD, **options: Any) -> SourceAccess:
        return SourceAccess(
            f"https://127.0.0.1:{self.port}",
            {"user": USER, "password": password},
            {
                "auth": "basic",
                "fingerprint_sha256": self.certificate.fingerprint,
                "smb_port": self.files.port,
                "shares": "D:\\=disks",
                **options,
            },
            self.folder / "ours",
        )

    def snapshots(self, vm: FakeVm) -> list[str]:
        """What is left of ours at the VM and on the share; its journal, where that alone is."""
        exported = (self.files.folder / "Exports").glob("*")
        made = [*(one.id for one in vm.snapshots), *(one["id"] for one in vm.points), *(one.name for one in exported)]
        return made or [line for line in vm.notes.splitlines() if line.startswith(MARK)]

    def called(self, name: str) -> int:
        return sum(one == name for one, _ in self.wsman.calls)


@contextmanager
def hyperv_host(folder: Path) -> Iterator[FakeHost]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trust").mkdir()
    trusted = certificates(folder / "trust")
    with samba(folder / "samba") as files:
        scratch = folder / "guests"
        scratch.mkdir()
        model = HyperV(files.folder, scratch)
        control = Wsman(model.answers(), USER, PASSWORD)
        with served(control, (str(trusted.certificate), str(trusted.key))) as port:
            yield FakeHost(model, control, port, trusted, files, folder)
