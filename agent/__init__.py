"""The agent: the daemon on each node, its worker process, and the `eval-agent` command."""

import os

# grpc reads it when it is imported, and else writes lines of its own about every handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
