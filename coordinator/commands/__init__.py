"""The commands of `eval-coordinator`, one module per group; each turns options into calls and prints the answer."""
