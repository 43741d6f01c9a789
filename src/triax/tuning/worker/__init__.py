"""The tuning worker: `process` times kernels, `client` starts it and talks to it, in `messages`."""
