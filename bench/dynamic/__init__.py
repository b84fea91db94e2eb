"""BladeDISC++'s table (Yuan et al., 2024): a Llama of four layers fine-tuned on batches of varying lengths, under a limit in bytes.

    python -m bench.dynamic [--quick] [--steps 6] [--sizes 4 8 16] [--share 0.6]
    python -m bench.dynamic.planned

`lengths` says how long samples are, `task` what is trained, `variants` and `paper` in which ways; each way is a process of its own
(`workers`), and those of one batch size take turns.
"""
