"""Results of several models in one table, figure and page."""
