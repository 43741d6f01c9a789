"""Programs of all ops whose arrays are placed at random: how they are drawn, and judged."""
