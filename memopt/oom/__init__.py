"""The report of an out of memory: what was held, by whom, and what would have made the request fit."""
