"""A call as plain frozen data: bound arguments, candidates with their grids, launches."""
