"""A plan before its job copies anything: refused or accepted, dry-run, and forecast.

Read `foreseen.py`, then `outage.py`. `retrying.py` and `repairable.py` are about jobs that have ended.
"""
