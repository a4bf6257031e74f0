"""Prints docs/limits.md."""

from __future__ import annotations

import sys

from moe_triton.limits.document import markdown

if __name__ == "__main__":
    sys.stdout.write(markdown())
