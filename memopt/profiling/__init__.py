"""Seeing memory: what lived when, whose it was, and what asked for it."""
