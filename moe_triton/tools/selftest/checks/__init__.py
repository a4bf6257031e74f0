"""What is checked, a module for each stage: what ranks run, and the list of checks that run it."""
