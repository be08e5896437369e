"""Callers: accounts, sessions, roles, and the gate that checks them.

Read `gate.py` first, then `auth.py`, `roles.py`, `sessions.py`, `origin.py`.
"""
