"""A peer in a process of its own, to be killed: `python -m tests.backups.peer_child HOME`. Prints its URL and fingerprint."""

import signal
import sys
from pathlib import Path

from tests.backups.peers import Peer

if __name__ == "__main__":
    with Peer(Path(sys.argv[1])).served() as peer:
        print(peer.place.url, peer.place.fingerprint_sha256, flush=True)
        signal.pause()
