"""A looker whose readers misbehave on purpose, as one would that a file has taken over; and what comes of that."""

from synvirt.errors import Internal, SynvirtError

# Its readers do what they are asked, instead of reading. `asked`: an expression about a look; None, where that is to be read.
_LOOKER = """
import os, socket, subprocess, sys, time
from synvirt.jobs.inspecting import looker
looker.CPU_S = 2
true = looker._look
def bad(look):
    asked = {asked}
    return true(look) if asked is None else str(eval(asked))
looker._look = bad
looker.main()
"""

# By what it does: the expression, the error, and words of it.
Misbehaviour = dict[str, tuple[str, type[SynvirtError], str]]


def looker_that_does(asked: str) -> tuple[str, ...]:
    """The arguments of Python."""
    return ("-P", "-c", _LOOKER.format(asked=asked))


def misbehaviour(broken: type[SynvirtError]) -> Misbehaviour:
    """`broken`: the error of a file that breaks its reader."""
    return {
        "reads the password hashes": ("open('/etc/shadow').read()", Internal, "PermissionError"),
        "connects out": ("socket.create_connection(('127.0.0.1', 9), 1)", Internal, "PermissionError"),
        "opens a Unix socket": ("socket.socket(socket.AF_UNIX)", Internal, "PermissionError"),
        "forks": ("os.fork()", Internal, "PermissionError"),
        "runs a program": ("subprocess.run(['/bin/true'])", Internal, "PermissionError"),
        "ends what started it": ("os.kill(os.getppid(), 9)", Internal, "PermissionError"),
        "takes 16 GiB": ("bytearray(16 << 30)", broken, "of memory"),
        "loops": ("[None for _ in iter(int, 1)]", broken, "processor time"),
        "is killed, as memory is short": ("os.kill(os.getpid(), 9)", Internal, "ended by SIGKILL"),
        "crashes": ("os.abort()", broken, "signal 6"),
        "ends": ("os._exit(0)", broken, "broke its reader"),
        "answers without end": ("'\"' + 'x' * (40 << 20) + '\"'", Internal, "no reader gives"),
    }
