"""Which config a kernel runs with: from the candidates of a call to one, found or measured."""
