"""Architectures side by side: what each takes and costs, before one is chosen."""
