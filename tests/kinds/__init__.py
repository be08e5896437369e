"""Every kind of job that there is, and the laws that all of them keep.

    table.py   a line a kind and way: a world that it runs in, and how it ends
    laws.py    killed at each moment, cancelled at each moment, and what may be left: written once
    copies.py  what a kill at a moment would leave, of a service that runs on: one run serves all its moments
    migrations.py, repairs.py, runs.py, running.py, restores.py, rehearsals.py, waves.py   the worlds

test_laws.py runs the lines that need no hypervisor; tests/real/test_laws_of_kinds.py the others.
"""
