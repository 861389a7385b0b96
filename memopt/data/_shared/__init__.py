"""Containers in memory that worker processes share."""
