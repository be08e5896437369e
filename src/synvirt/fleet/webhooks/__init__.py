"""What a wave tells other systems.

`events.py` says what is sent, `delivering.py` sends it, `deliveries.py` shows what came of it.
"""
