"""Orders that a copy worker does not understand."""

import json
import subprocess
import sys

PASSWORD = "correct-horse-battery-staple"


def test_an_order_that_is_not_understood_is_not_repeated_in_the_log() -> None:
    """It may hold a password, and the service logs what a worker says."""
    order = {
        "kind": "copy",
        "disks": [{"key": "k", "reader": {"format": "datastore", "password": PASSWORD}, "writer": PASSWORD}],
    }
    argv = [sys.executable, "-m", "synvirt.worker"]
    done = subprocess.run(argv, input=json.dumps(order) + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not an order" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
