"""Attribution of live tensors: to modules, optimizers and gradients, to autograd graphs, and to the program's
variables."""
