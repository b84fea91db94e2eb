"""What is CUDA's alone: planned addresses before PyTorch's allocator, and what that allocator would count and reserve."""
