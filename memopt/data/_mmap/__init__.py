"""Rows of tensors in memory-mapped files: MmapDataset, MmapWriter."""
