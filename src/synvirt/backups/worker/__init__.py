"""What a worker process does of backups, away from the service, and the cage that it does it in.

tasks.py is the table; taking.py reads a guest's disk into a repository, taking_journal.py is what a worker that was killed
leaves of that.
"""
