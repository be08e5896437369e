"""A service in a process of its own that runs one job by an export lease, to be killed in the middle.

`python -m tests.live.vsphere.lease.service FOLDER JOB URL FINGERPRINT CONTROL`.
"""

import sys
from pathlib import Path
from uuid import UUID

from tests.fakes.vcenter import VCenter
from tests.live.vsphere.lease.lab import LeaseHouse


def main() -> None:
    folder, job, *vcenter = sys.argv[1:]
    LeaseHouse(Path(folder), VCenter(*vcenter)).run(UUID(job))


if __name__ == "__main__":
    main()
