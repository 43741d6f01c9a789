"""Plans which row every token goes to."""
