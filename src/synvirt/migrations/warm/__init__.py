"""How a Live job is copied: by passes, the last one while its source is shut down. Read in this order:

syncing ─▶ deciding, holding ─▶ one_pass ─▶ forecasting ─▶ setbacks ─▶ snapshots
"""
