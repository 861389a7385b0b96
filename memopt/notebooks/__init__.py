"""In Jupyter and IPython: %load_ext memopt, and what it brings."""
