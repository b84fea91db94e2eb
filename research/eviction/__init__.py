"""BladeDISC++'s rematerialisation (Yuan et al., 2024, section 2.3): found at compile time, decided at run time, operator by operator.

- `compile_time`: for each tensor and each of its uses, the subgraphs that could make it again by then, by symbolic impact
- `live`: what is there while a program runs, who still wants it, and how many bytes it takes
- `choice`: which tensor to evict, and how it is to come back
- `run_time`: the program runs at a point of its range within a limit, and what it ran is the answer

The paper leaves open what its choice weighs and refers to DELTA (Tang et al., 2022), which filters tensors by size, cost and time until
they are read, and directs each to the cheaper of recomputation and reloading. `choice` does both at once. Where the paper is silent,
whatever is better for it was taken: the check comes before every operator, knows what that needs, and comes within regeneration, too;
what is regenerated on the way and wanted later stays; what a regeneration reads may itself be evicted.
"""
