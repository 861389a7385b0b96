"""The checks of `memopt gpu-check`: parts, each in a process of its own, and the report of them."""
