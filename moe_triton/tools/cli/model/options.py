"""Options that commands of the model share."""

from __future__ import annotations

from typing import Annotated

import typer

MARKDOWN = "--markdown"
Markdown = Annotated[bool, typer.Option(MARKDOWN, help="tables in Markdown, for a page")]
MOST_TOKENS, MOST_EXPERTS, MOST_HIDDEN, MOST_BLOCKS = 1 << 16, 1 << 14, 1 << 20, 1 << 10
"""What the model is asked about at most: a group's routing is sampled, and held in memory."""
Hidden = Annotated[int, typer.Option(help="elements of a token's row", min=1, max=MOST_HIDDEN)]
Experts = Annotated[int, typer.Option(help="of the group; 256 or more if not given", min=0, max=MOST_EXPERTS)]
Seed = Annotated[int, typer.Option(help="of the routing", min=0)]
