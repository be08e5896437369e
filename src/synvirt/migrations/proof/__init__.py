"""What proves a job: its receipt, whether the moved guest is the one of the source, and a repair of volumes by a receipt."""
