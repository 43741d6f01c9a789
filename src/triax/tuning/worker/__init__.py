"""The tuning worker: `process` times kernels by means of `driver`; `client` is who it answers."""
