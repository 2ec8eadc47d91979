"""Whether what was said earlier can be recalled: generated tasks, and text that repeats itself."""
