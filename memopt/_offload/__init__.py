"""Activations and layers' parameters kept off the device during a step, on the host or on a disk."""
