"""What kernels must move and compute, and how fast a GPU could be at that: a prediction."""
