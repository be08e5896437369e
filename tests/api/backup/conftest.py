"""What tests of backups over HTTP share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.service import Service


@contextmanager
def served_guest(folder: Path, content: bytes, *, database_url: str = "", has_pages: bool = True) -> Iterator[Service]:
    """A service with the guest `web`, whose disk has this content. `folder`: gets a folder for a repository, too."""
    made = Service(folder / "service", has_pages=has_pages, database_url=database_url, host_id="local")
    made.guests.image("web", content)
    (folder / "repository").mkdir()
    with made.served():
        yield made
    made.close()
