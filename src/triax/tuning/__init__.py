"""Chooses a kernel's config from the candidates of a call, by looking it up or measuring."""
