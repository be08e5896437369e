"""A real service that offers a folder, over TLS; and the folder as another SynVirt sees it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from synvirt.api.tls import fingerprint
from synvirt.errors import Unauthorized
from synvirt.model.access import Fingerprint
from synvirt.repository.peer import PeerFolder, PeerPlace
from tests.fakes.service import Service
from tests.running.ports import free_port

USER, PASSWORD = "office", "an offered folder's password"


def _known(user: str, password: str, address: str) -> None:
    if (user, password) not in ((USER, PASSWORD), ("admin", "admin's")):
        raise Unauthorized("the user or the password is wrong")


class Peer:
    """`folder`: what is offered, on the peer's disk. It may be served, stopped, and served again at the same port."""

    def __init__(self, home: Path, *, keep_days: float = 0, quota_bytes: int | None = None) -> None:
        self.folder, self._home = home / "offered", home / "peer"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._quota_bytes = quota_bytes
        self._keep_days, self._listen = keep_days, f"127.0.0.1:{free_port()}"
        self._opened: list[PeerFolder] = []
        self.place = PeerPlace(url="https://127.0.0.1/", fingerprint_sha256="", username=USER, password=PASSWORD)

    @contextmanager
    def served(self) -> Iterator["Peer"]:
        offer = {"path": str(self.folder), "user": USER, "keep_days": self._keep_days, "quota_bytes": self._quota_bytes}
        service = Service(self._home, check_password=_known, listen=self._listen, backup_offers={"office": offer})
        try:
            with service.served() as server:
                self.place = PeerPlace(
                    url=f"{server.address}/api/v1/backup/peer/office",
                    fingerprint_sha256=self.shown(),
                    username=USER,
                    password=PASSWORD,
                )
                yield self
                for folder in self._opened:
                    folder.close()
        finally:
            service.close()

    def shown(self) -> Fingerprint:
        return fingerprint(self._home / "keyring/tls.crt")

    def forget_certificate(self) -> None:
        (self._home / "keyring/tls.crt").unlink()

    def opened(self, *, patience_s: float = 20, **others: Any) -> PeerFolder:
        """The folder as another host sees it; `others`: what is different in the place that it calls."""
        self._opened.append(PeerFolder(replace(self.place, **others), patience_s=patience_s))
        return self._opened[-1]
