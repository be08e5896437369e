"""Jobs: the state table, the steps, the engine that runs them, the worker process that copies."""
