"""A2: a block for every peer, with all that a rank has for it."""
