"""The coordinator: decides who scores what, journals what was scored, and reports. Never imports torch."""
