"""Rehearsals: a job's guest is started from clones of its volumes, looked at, and swept, while the copying goes on.

    asked ─▶ Waiting ─▶ Preparing ─▶ Booting ─▶ Checking ─▶ Sweeping ─▶ Passed │ Failed │ Cancelled
                │ the job clones (migrations/cloning.py)        ▲
                └── cancel, any error, the job cuts over ───────┘

Read in this order: `steps.py` (a function a state), `engine.py` (runs them, on the kernel's runner), `asking.py` (what the API
asks). All that a rehearsal makes has a name that its id gives: so its row is the ledger, written before anything is made, and a
rehearsal has ended only when all of it is gone. Neither the source nor the volumes of the job are ever touched.
"""
