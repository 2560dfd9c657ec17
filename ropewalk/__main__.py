"""`python -m ropewalk` is `ropewalk`."""

from ropewalk.cli.main import main

main()
