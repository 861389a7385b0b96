"""Drop-in replacements for torch.utils.checkpoint."""
