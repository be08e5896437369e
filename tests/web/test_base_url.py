"""Every page works under a {base_url} of its own: no link, form, file or stream leads out of it, and none leads nowhere."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag

import httpx
import pytest

from synvirt.model.kinds import LiveKind
from synvirt.model.sources import SourceRequest
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.service import PASSWORD, USER, Service
from tests.offline import appliances
from tests.web import jobs
from tests.web.conftest import serving

BASE = "/a/kvm-host"
# What the browser follows by itself or on request.
FOLLOWED = frozenset({"href", "src", "action", "formaction", "hx-get", "hx-post", "sse-connect", "data-upload", "data-then"})
# Each list of this test's service is short: a page that leads to ever new pages is a mistake.
PAGES_MAX = 200


class Addresses(HTMLParser):
    """`followed`: requested with GET by following a link; of all the addresses that are `named`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.named: set[str] = set()
        self.followed: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in FOLLOWED and value and not value.startswith("#"):
                self.named.add(urldefrag(value).url)
                if name in ("href", "src"):
                    self.followed.add(urldefrag(value).url)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    platform = FakePlatform(tmp_path / "platform")
    platform.add_vm("vm-1", {"boot": bytes(65536)})
    service = Service(tmp_path, platforms=with_fake(platform), base_url=BASE)
    appliances.image(service.settings.imports_dir / "folder", "one.qcow2", "qcow2", bytes(1 << 20))
    service.uploads.begin("one.ova").finish(None)
    service.sources.add(
        SourceRequest(name="rack", kind=LiveKind.LIBVIRT_REMOTE, endpoint="qemu+ssh://root@rack.invalid/system")
    )
    for add in (jobs.warm, jobs.downgraded, jobs.unbooted, jobs.completed):
        add(service)
    with serving(service) as address:
        yield address
    service.close()


def test_no_page_leads_out_of_its_base_url(address: str) -> None:
    with httpx.Client(base_url=address, auth=(USER, PASSWORD), verify=False, timeout=60) as client:
        waiting, seen = [f"{BASE}/"], {f"{BASE}/"}
        while waiting:
            path = waiting.pop()
            answer = client.get(path)
            assert answer.status_code != 404, path
            if not answer.headers["content-type"].startswith("text/html"):
                continue
            found = Addresses(answer.text)
            assert {one for one in found.named if not one.startswith(f"{BASE}/")} == set(), path
            waiting += sorted(found.followed - seen)
            seen |= found.followed
            assert len(seen) < PAGES_MAX
        assert client.get("/").status_code == 404
        # As people type it.
        begun = client.get(BASE)
        assert (begun.status_code, begun.headers["location"]) == (307, f"{BASE}/")
    for part in (
        "/new",
        "/new/files?path=",
        "/new/machine?kind=live_vm",
        "/uploads",
        "/sources",
        "/doctor",
        "/migrations/",
        "/static/",
    ):
        assert any(one.startswith(BASE + part) for one in seen), f"nothing leads to {part}"
