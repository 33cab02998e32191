"""The engine's scheduler: queues, step budgets and KV block bookkeeping. No torch, no I/O."""
