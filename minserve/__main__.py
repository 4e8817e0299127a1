"""`python -m minserve`: the command line without an installed script."""

from minserve.cli import main

main()
