"""How a child that reads hostile input is confined, by the kernel, before it reads the first byte of it.

    Cage ─▶ enter() ─▶ no_new_privs, limits, no capabilities, an empty network, Landlock (files), seccomp (system calls)

Read `confining.py`, then `landlock.py` and `seccomp.py`. Every layer is one that this host has: `layers()` says which, and the
doctor shows it. A layer that is missing is left out, never one that is there.
"""

from synvirt.cage.confining import Cage, Network, enter, layers, may_change_user, may_open_others_files

__all__ = ["Cage", "Network", "enter", "layers", "may_change_user", "may_open_others_files"]
