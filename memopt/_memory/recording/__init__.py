"""Recordings of memory: lifetimes of blocks, their owners, and the code that requested them."""
