"""Which experts every token goes to, and by what weights."""
