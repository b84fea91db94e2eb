"""What makes a release: wheels with compiled kernels, and the source distribution."""
