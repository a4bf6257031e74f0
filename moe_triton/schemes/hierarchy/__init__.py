"""Between servers of A2 or A3: a token goes once to each server, and is relayed there."""
