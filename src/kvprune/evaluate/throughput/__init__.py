"""How fast a model decodes, dense and pruned."""
