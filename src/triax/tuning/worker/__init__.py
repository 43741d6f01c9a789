"""The tuning worker: `process` times kernels on a GPU (`driver`), `client` starts it and talks to it."""
