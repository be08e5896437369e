"""python -m bench.platforms.vms [--vms N]: how long a vSphere source takes to list its VMs, against VMware's own simulator.

The whole of a question: a session, the list, the session's end; then a page of ten, as the page asks for it while somebody
looks through the list. The measures, for 2,000 VMs: 1 s, and 0.2 s for ten of them after that. On a busy machine the processor
time of our side says more than the clock: the simulator works too.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from bench.platforms.listed import row, took
from synvirt.keyring import Keyring
from synvirt.live.registry import BY_KIND
from synvirt.live.vsphere.adapter import VimApi
from synvirt.migrations.sources.registered import Sources
from synvirt.model.kinds import LiveKind
from synvirt.model.sources import SourceRequest
from synvirt.store import Store
from tests.fakes.vcenter import VCenter, vcenter

REACH_S, PAGE_REACH_S = 1.0, 0.2
PAGE_ROWS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.vms", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the source has: half of them in each of two pools")
    parser.add_argument("--rounds", type=int, default=5, help="questions that count")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder,
        vcenter(Path(folder) / "vcenter", vms=options.vms // 2) as host,
    ):
        cpu = time.process_time()
        seconds = took(lambda: VimApi(host.access()), options.vms // 2 * 2, options.rounds)
        cpu = (time.process_time() - cpu) / (options.rounds + 1)
        pages = asyncio.run(_pages(host, Path(folder), options.rounds))
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    listed = f"{options.vms} VMs listed ({cpu:.2f} s of processor time)"
    row(listed, seconds, f"≤ {REACH_S} s", ok=statistics.median(seconds) <= REACH_S)
    row(f"{PAGE_ROWS} of them after that", pages, f"≤ {PAGE_REACH_S} s", ok=statistics.median(pages) <= PAGE_REACH_S)


async def _pages(host: VCenter, folder: Path, rounds: int) -> list[float]:
    """Seconds of pages after the first, as GET /sources/:id/vms asks for them."""
    store = Store(f"sqlite:///{folder / 'store.db'}")
    keyring = Keyring(folder / "migrator.key")
    sources = Sources(store.sources, keyring, host="bench", platforms=BY_KIND, folder=folder / "sources")
    access = host.access()
    request = SourceRequest.model_validate(
        {
            "name": "bench",
            "kind": LiveKind.VIM_API,
            "endpoint": access.endpoint,
            "credentials": access.credentials,
            "options": access.options,
        }
    )
    source = await asyncio.to_thread(sources.add, request)
    seconds = []
    cursor: str | None = None
    for _ in range(rounds + 1):
        began = time.monotonic()
        found, cursor = await sources.list_vms(source.id, limit=PAGE_ROWS, cursor=cursor)
        assert len(found) == PAGE_ROWS
        seconds.append(time.monotonic() - began)
    store.close()
    return seconds[1:]


if __name__ == "__main__":
    main()
