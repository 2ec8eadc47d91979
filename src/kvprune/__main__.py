"""python -m kvprune: the command line, for launchers that start modules."""

from kvprune.cli import main

main()
