"""Several processes that train one model: what they tell one another beside their gradients."""
