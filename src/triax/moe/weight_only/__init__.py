"""Few 16-bit rows times weights of 8 or 4 bits, where reading the weights is what takes time."""
