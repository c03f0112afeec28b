"""`python -m coordinator` is `eval-coordinator`."""

from coordinator.cli import main

main()
