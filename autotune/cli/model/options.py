"""Options that commands of the model share."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_triton.tools.cli.options import MOST_EXPERTS, MOST_HIDDEN

MARKDOWN = "--markdown"
Markdown = Annotated[bool, typer.Option(MARKDOWN, help="tables in Markdown, for a page")]
MOST_BLOCKS = 1 << 10
Hidden = Annotated[int, typer.Option(help="elements of a token's row", min=1, max=MOST_HIDDEN)]
Experts = Annotated[int, typer.Option(help="of the group; 256 or more if not given", min=0, max=MOST_EXPERTS)]
Seed = Annotated[int, typer.Option(help="of the routing", min=0)]
