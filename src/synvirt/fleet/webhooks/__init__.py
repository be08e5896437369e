"""Notifications of a wave to other systems.

`events.py` makes them, `delivering.py` sends them, `deliveries.py` shows the results.
"""
