"""Prints the program `synvirt` for the environment whose Python runs this: `python3 -P packaging/launcher.py > bin/synvirt`.

That program starts Python without its module `site` (-S). `site` looks through every folder of packages for .pth files and runs
them, which takes longer than copying a small disk; all that `synvirt` needs of it are the folders, and they are written out.
"""

import sys

PROGRAM = '''\
#!{prefix}/bin/python3 -SP
"""Written by packaging/launcher.py: Python's `site` would find these folders at each start."""

import _signal
import sys

# First of all, by what is built into Python: Ctrl-C ends the program at once, with no traceback from the middle of an import.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
sys.prefix = sys.exec_prefix = {prefix!r}
sys.path[:] = {path!r}

from synvirt.__main__ import main

main()
'''

if __name__ == "__main__":
    sys.stdout.write(PROGRAM.format(prefix=sys.prefix, path=sys.path))
