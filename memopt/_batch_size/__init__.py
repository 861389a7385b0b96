"""The search for the largest batch size that fits, and batch sizes that adapt to what fits."""
