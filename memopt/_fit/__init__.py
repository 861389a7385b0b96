"""memopt.fit: the levers with which a training step of a live model stays within a budget."""
