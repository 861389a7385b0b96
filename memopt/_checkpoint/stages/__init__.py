"""A model's stages: found, split, measured, and run with the state that each needs."""
