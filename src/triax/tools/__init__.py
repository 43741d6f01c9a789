"""Tools for whole programs: tuning, and explaining which configs were chosen."""
