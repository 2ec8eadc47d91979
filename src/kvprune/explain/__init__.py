"""What a model forgets: the record of a text, a page to explore it, statistics and figures."""

from kvprune.explain.trace import Trace as Trace

__all__ = ["Trace"]
