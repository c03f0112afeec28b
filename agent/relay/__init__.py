"""What an agent with the role AGGREGATE does: it speaks for the agents of its site, and decides nothing."""
