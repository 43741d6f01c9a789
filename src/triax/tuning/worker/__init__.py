"""The tuning worker: `process` times kernels through `driver`; `client` runs in the program."""
