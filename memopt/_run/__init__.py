"""`python -m memopt run`: a parent that watches, and a child in which the script runs as it would alone."""
