"""The coordinator: decides who scores what, journals what was scored, and reports. Never imports torch."""

import os

# grpc reads it when it is imported, and else writes a line of its own for every port scanner that knocks.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
