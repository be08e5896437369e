"""The worker as it runs, `python -m synvirt.worker`: which kinds of orders there are, and how what they name is opened.

Beside `main` the only module that names concrete things. It imports little: a worker is started while a guest waits.
"""

import os
from functools import partial

from synvirt.disks import open_reader, open_writer
from synvirt.jobs.copying_disks import Openers, copy_disks
from synvirt.jobs.orders import CopyOrder
from synvirt.jobs.worker import Task, Tasks, main

OPENERS = Openers(reader=open_reader, writer=open_writer)

TASKS: Tasks = {
    "copy": lambda: Task(CopyOrder, partial(copy_disks, openers=OPENERS)),
}

if __name__ == "__main__":
    # Everything is durable and said; to take an interpreter apart is 40 ms, for which the service, or a stopped guest, waits.
    os._exit(main(TASKS))
