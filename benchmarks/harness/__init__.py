"""What the benchmarks of this folder share: inputs, times, and records of where and when."""
