"""All that is to be measured on a GPU, in the order of worth, each part in a process of its own: `python -m bench.on_gpu --minutes 15`."""
