"""The one error that kvprune raises on purpose."""


class PruneError(ValueError):
    """Bad input. The message names the thing, its value and the remedy."""
