"""A2 between servers: a token goes once to each server, and is relayed there."""
