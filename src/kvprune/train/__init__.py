"""Teaching a model what to forget."""
