"""How a batch plan becomes tokens: executors behind one interface."""
