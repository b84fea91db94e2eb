"""What kernels take: a model proposes, measurements decide among the few that are close, and are kept by machine and kernel."""
