"""Chaos on PostgreSQL: three services, many jobs, faults drawn from a seed.

running.py ─┬─ service.py   a host's engine, in a process of its own
            ├─ line.py      its connection to the database, which can be cut, or fall silent
            ├─ faults.py    the table of what goes wrong
            └─ watching.py  who writes which volume, and who took which slot, while all of it goes on
"""
