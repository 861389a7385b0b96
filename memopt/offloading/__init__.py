"""What a training step need not keep on the device: activations, and layers' parameters, on the host or on a disk."""
