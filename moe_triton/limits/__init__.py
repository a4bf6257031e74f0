"""The language of rules on a `Config` and on a call, and the rules that a product has whatever the scheme.

What a scheme has besides is in its folder, and `moe_triton.schemes.rules` checks both. Their page is
docs/limits.md, "Limits". ``relaxed`` lifts lower bounds that only a real product has, so that tests and demos
can be small; nothing else.
"""

from __future__ import annotations

from moe_triton.limits.call import Call
from moe_triton.limits.common import GENERATIONS, MAX_GROUP_NAME

__all__ = ["GENERATIONS", "MAX_GROUP_NAME", "Call"]
