"""Few 16-bit rows times 8-bit weights, where reading the weights is what takes time."""
