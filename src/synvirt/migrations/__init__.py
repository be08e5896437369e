"""Migrations, a kind of job. Read in this order:

intake.py            a plan becomes a job, and an operator's request reaches one; planning/ checks a plan, and forecasts
engine.py            a job on the kernel's runner ─▶ advance.py: one move of it ─▶ steps.py: a function for each state
states.py            which state comes next, as a table
job.py, rooms.py     a job while a step runs, and what it works with; memory.py; patience.py: how long it waits
passes.py            a pass, copied by a worker; hearing.py: what the worker says; sharing.py: a rate that several share
warm/                the passes of a Live job; source_vm.py: its VM; cloning.py: clones for a rehearsal between two passes
files.py             the files of an Offline job; passthrough.py: converted by a tool; instant.py: its guest runs at once
repairing.py         volumes of another job, compared with its receipt
landing.py           the guest here: defined, started, seen to boot; overrun.py: rolled back; proof/: what proves the move
removing.py          what is left of ended jobs; tidying.py: what they left behind
sources/, hosts/     the registered platforms, the hosts of a fleet; uploads.py: files that callers sent; secrets.py
"""
