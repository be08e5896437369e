"""Rehearsals: a job's guest is started from clones of its volumes, checked, and removed, while the copying goes on.

    asked ─▶ Waiting ─▶ Preparing ─▶ Booting ─▶ Checking ─▶ Sweeping ─▶ Passed │ Failed │ Cancelled
                │ the job clones (migrations/cloning.py)        ▲
                └── cancel, any error, the job cuts over ───────┘

Read in this order: `under_way.py` (what the steps share), `steps.py` (a function for each state), `engine.py` (runs them, on
the kernel's runner), `asking.py` (what the API asks). The rehearsal's id gives the names of all that it makes: so its row is
the ledger, written before anything is made. A rehearsal has ended only when all of that is removed. It never changes the
source or the job's volumes.
"""
