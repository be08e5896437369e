"""A service without its API that imports Hyper-V exports by a tool, in a process of its own that a test can kill.

python -m tests.offline.hyperv.vmcx_service FOLDER STORE_URL MANNER
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from synvirt.jobs.process import started
from synvirt.model.kinds import OfflineKind
from synvirt.offline.hyperv.tool import VmcxTool
from tests.fakes.workers import in_process
from tests.house import House
from tests.migrations.engine_process import serve
from tests.offline.hyperv import conversion_tool

Way = Literal["auto", "tool", "own"]


def by_tool(folder: Path, manner: str, way: Way = "tool", **fields: Any) -> House:
    """A house where exports are imported by a tool of that manner, and copied in this process if `fields` say nothing else."""
    fields.setdefault("workers", in_process)
    limits = {"timeout_s": fields.pop("timeout_s", 120), "driver": fields.pop("driver", "hyperv")}
    command = conversion_tool.install(folder / "bin")
    tool = VmcxTool(folder / "passthrough", way, command, arguments=conversion_tool.arguments(manner), **limits)
    house = House(folder, real_importers=True, **fields)
    house.rooms = replace(house.rooms, passthroughs={OfflineKind.VMCX_EXPORT: tool})
    return house


if __name__ == "__main__":
    folder, url, manner = sys.argv[1:]
    serve(by_tool(Path(folder), manner, store_url=url, workers=started))
