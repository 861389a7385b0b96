"""Who holds tensors: what modules, optimizers and gradients claim, what autograd's graphs keep, and which of the
program's variables lead there."""
