"""What kernels take: a model proposes; sources of the few that it cannot tell apart, to be measured."""
