"""Plans of a model's checkpointing: from measured costs and a budget to a schedule."""
