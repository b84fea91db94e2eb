"""Are regions right that came from elsewhere than capture? Kernels are made by what their graphs say, and look at nothing when they run."""
