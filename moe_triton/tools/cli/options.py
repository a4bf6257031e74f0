"""What commands are asked about at most."""

from __future__ import annotations

MOST_TOKENS, MOST_EXPERTS, MOST_HIDDEN = 1 << 16, 1 << 14, 1 << 20
"""A group's routing is held in memory."""
