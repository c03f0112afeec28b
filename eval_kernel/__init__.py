"""The evaluation kernel: what a job is, how it is cut, scored and summed. Knows no network and no scheduler."""

__version__ = "0.1.0"

#: Bumped whenever a change could alter a sum or a count; part of every result's provenance.
KERNEL_VERSION = 3
