"""Every figure and table of docs/results.md: run one as `python -m experiments.NAME`."""
