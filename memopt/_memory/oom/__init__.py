"""The report of an out-of-memory error: the memory held, its owners, and changes that would make the request fit."""
