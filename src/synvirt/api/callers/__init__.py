"""Who calls: accounts, sessions, roles, and the door that asks.

Read `gate.py` first, then `auth.py`, `roles.py`, `sessions.py`, `origin.py`.
"""
