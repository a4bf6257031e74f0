"""The checks, a module for each stage or a few: the functions that ranks run, and the list of checks."""
