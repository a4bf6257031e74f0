"""Tokens go to their final place, and results are read where they are."""
