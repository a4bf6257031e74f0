"""What is read in reports of ``moe-triton selftest``: a machine's constants, and times of steps."""
