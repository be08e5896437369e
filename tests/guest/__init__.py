"""Tests that run inside the lab guest, on real zfs: tests/real/test_zfs.py boots it and runs them there.

Their files are not called test_….py, so that they are not run here, where there is no zfs.
"""

import gc
import sys

# Nothing of what is loaded is garbage, and each look through it takes a second here; plugin.py ends that.
gc.disable()
# structlog would load it for tracebacks in colours: a second here, which nobody sees.
sys.modules["rich"] = None  # type: ignore[assignment]
