"""How a Live job is copied: passes, the last of them with its source shut down. Read from above:

syncing ─▶ deciding, holding ─▶ one_pass ─▶ setbacks ─▶ snapshots
"""
