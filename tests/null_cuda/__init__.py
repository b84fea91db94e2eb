"""A GPU that computes nothing: torch's CUDA build on a stand-in for CUDA's runtime, driver, cuBLAS and cuDNN.

    python -m tests.null_cuda pytest tests/gpu          # a command on it; on a machine without a GPU, with a CUDA build of torch

Dispatch, memory and control flow are as on an H100: torch's caching allocator and its errors, cuDNN's workspaces, autocast, captures of
streams with what they forbid. There are no numbers (what is read back is mostly zeros) and no times: tests of those carry the
marker `computes`, and are skipped on it. `NULL_CUDA_BYTES` is its memory, 80 GiB without.

It stands in for all that NVIDIA's packages hold but the headers of CUDA's runtime, so that torch may be installed without them
(`environment.py`). With `python -m tests.null_cuda --no-device ...` torch loads, and finds no GPU, as on a laptop.
"""
