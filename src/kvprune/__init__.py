"""Teach a causal language model to forget the tokens that it no longer needs."""
