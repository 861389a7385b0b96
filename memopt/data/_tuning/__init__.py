"""DataLoader settings by measurement, and the memory of its workers: tune, watch."""
