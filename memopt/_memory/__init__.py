"""Memory made visible: recordings, live tensors, out-of-memory reports, and HTML of each."""
