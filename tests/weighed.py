"""A model of one function, for graphs of whatever a rule is shown on."""

import torch
from torch import nn


class Weighed(nn.Module):
    """A parameter, a function of it, and a second parameter that the result is multiplied by."""

    def __init__(self, shape, function, dtype, of=1):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.function = function
        with torch.random.fork_rng(), torch.no_grad():
            self.w = nn.Parameter(torch.zeros(function(self.x.detach()).shape, dtype=dtype))

    def forward(self):
        return self.function(self.x) * self.w
