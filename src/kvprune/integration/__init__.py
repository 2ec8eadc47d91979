"""Into transformers and out again: the handle, the hooks, and what one layer does in a pass."""
