"""The kernel: what every kind of job needs, written once. A kind brings its states, its steps and its document.

Read in this order: `stop.py` (an operator's request to cancel), `runner.py` (every unended job runs, also after a crash),
`lease.py` (only while this host holds its lease), `ledger.py` (what a job makes is recorded first, and undone), `slots.py` (how
many jobs work at once), `board.py`, `rate.py` and `course.py` (progress, in memory, and how fast it was). What a job remembers
is in typed rows (`store/memory.py`), which its kind defines (`migrations/memory.py`).
Then what copies: `orders.py` and `wire.py` (what a worker process receives and sends), `worker.py`, `copying_disks.py`, and
`process.py`, the service's side of it. `inspecting/` reads untrusted files before a job does.
"""
