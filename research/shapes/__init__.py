"""BladeDISC++'s shape graph (Yuan et al., 2024, section 2.1): which sizes are equal by what operators say, and which of two is less."""
