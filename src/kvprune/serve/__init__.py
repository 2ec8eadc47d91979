"""A server: many requests at once through one pruned model, behind OpenAI's API."""
