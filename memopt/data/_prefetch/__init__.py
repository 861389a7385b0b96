"""Batches copied to the device ahead of their use: Prefetcher."""
