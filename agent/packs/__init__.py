"""Shards' tokens from node to node of a site: prepared ahead by one agent, fetched ahead by those that score."""
