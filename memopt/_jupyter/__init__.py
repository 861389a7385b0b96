"""Support for Jupyter and IPython: %load_ext memopt."""
