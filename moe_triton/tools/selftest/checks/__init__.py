"""The checks, a module for each stage: the functions that ranks run, and the list of checks."""
