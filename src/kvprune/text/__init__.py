"""Corpora, tokens, rows and windows."""
