"""Text for training and evaluation: corpora, tokens, rows and windows."""
