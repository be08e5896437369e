"""How a child that reads hostile input is confined, by the kernel, before it reads its first byte.

    Cage ─▶ enter() ─▶ no_new_privs, limits, no capabilities, an empty network, Landlock (files), seccomp (system calls)

Read `confining.py`, then `landlock.py` and `seccomp.py`. `layers()` says which layers this host has, and the doctor shows it.
Only a layer that this host lacks is left out.
"""

from synvirt.cage.confining import Cage, Network, enter, layers, may_change_user, may_open_others_files

__all__ = ["Cage", "Network", "enter", "layers", "may_change_user", "may_open_others_files"]
