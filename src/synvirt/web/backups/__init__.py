"""The pages of backups: `jobs.py`, `points.py`, `repositories.py`; `words.py` has what they call things."""
