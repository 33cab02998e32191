"""What decides in an engine: queues, step budgets and KV block bookkeeping. No torch, no I/O."""
