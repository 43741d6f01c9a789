"""Which row every token goes to."""
