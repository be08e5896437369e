"""The hosts of a fleet: `about.py` lists them, and has each describe itself; `taking_over.py` takes over a lost one's jobs."""
