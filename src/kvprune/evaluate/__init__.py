"""How good is a pruned model, how much does it prune, what does that save, how fast is it."""
