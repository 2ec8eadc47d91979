"""Zero-shot tasks, through lm-eval."""
