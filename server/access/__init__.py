"""Access control: authentication, tenants, and admission to the queue."""
