"""What a worker process does for backups, outside the service, and its cage.

tasks.py is the table; taking.py reads a guest's disk into a repository; taking_journal.py records the progress of that for the
case that the worker is killed.
"""
