"""Models over several ranks, and models larger than memory: layouts, groups, tensor parallel, sharded, streamed."""
