"""What `make bench` runs: the MoE ops at the shapes of models, checked, timed and compared."""
