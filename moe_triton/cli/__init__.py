"""The ``moe-triton`` command."""
