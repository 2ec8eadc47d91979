"""How well a model predicts text, by context size."""
