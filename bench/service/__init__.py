"""What the service costs: its page and API among many jobs, its memory, held jobs, silent peers, the first byte of a copy."""
