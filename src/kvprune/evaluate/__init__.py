"""How good a pruned model is, how much it prunes, what that saves, and how fast it is."""
