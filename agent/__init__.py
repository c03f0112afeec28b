"""The agent: the daemon on each node, its worker process, and the `eval-agent` command."""
