"""What proves a job: its receipt, and whether the moved guest is the one of the source."""
