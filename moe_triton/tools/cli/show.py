"""``moe-triton layout`` and ``moe-triton plan``: print layouts, plans, and why they have so many parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console

from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config, Product
from moe_triton.core.row_formats import row_format_of
from moe_triton.core.soc import SOC_OF_PRODUCT, SOCS
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.chosen_scheme import Asked, ChosenScheme, choose_scheme
from moe_triton.runtime.construction import check_tuning
from moe_triton.schemes import layout_of, make_scheme, product_of, scheme_type
from moe_triton.schemes.rank_context import RankContext
from moe_triton.tools.cli.options import servers_of
from moe_triton.tools.text_table import TextTable, names, numbers, say, texts

MB = 1_000_000


@dataclass(frozen=True)
class Group:
    """A group as the command line says it.

    Attributes:
        make: makes a `Config` of its sizes from the other fields.
        asked: how tokens are to travel, and on which back end.
        product: whose; None for that which has the scheme.
        ranks_per_server: as "8", or "3,1"; empty for what the product's servers have.
    """

    make: Callable[..., Config]
    asked: Asked
    product: Product | None = None
    ranks_per_server: str = ""

    def chosen(self) -> ChosenScheme:
        """Its settings with the scheme that is taken.

        Raises:
            ArgumentError: they are refused.
        """
        product = self.product or product_of(self.asked.comm_alg or "")
        servers = servers_of(self.ranks_per_server)
        config = self.make(product=product, relaxed=True, is_of_buffer=True, ranks_per_server=servers)
        return choose_scheme(self.asked, config, range(config.num_ranks), exchange=False)


def show_layout(group: Group, console: Console) -> None:
    """Every region of a window: base, and extent x stride of each dimension.

    Of a dimension that is rotated from one rank's window to the next one's it says so: ``(+ rank)``.

    Raises:
        ArgumentError: the group is refused.
    """
    chosen = group.chosen()
    layout = layout_of(chosen.config.padded)
    _say_scheme(chosen, console)
    console.print()
    parts = {"window": layout.window_bytes, "data": layout.data_bytes, "zone": layout.zone_bytes}
    TextTable(
        (names("part"), numbers("bytes"), numbers("size")),
        [(part, num_bytes, size_of(num_bytes)) for part, num_bytes in parts.items()],
    ).print(console)
    console.print()
    columns = (
        *(names("region"), numbers("base"), numbers("end"), numbers("size", spare=1), numbers("item bytes")),
        texts("dimensions (extent x stride)"),
    )
    rows = []
    for region in layout.regions:
        dims = ", ".join(
            f"{dim.name} {dim.extent} x {dim.stride}{' (+ rank)' if dim.name == region.rotated_dim else ''}"
            for dim in region.dims
        )
        size = size_of(region.item_bytes * math.prod(dim.extent for dim in region.dims))
        rows.append((region.name, region.base, region.end, size, region.item_bytes, dims))
    TextTable(columns, rows).print(console)


def size_of(num_bytes: int) -> str:
    """Bytes for people: in MB, or in KB where it is less than one."""
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= MB else f"{num_bytes / 1e3:.2f} KB"


def show_plans(
    group: Group, quantize: str | None, blocks: int | None, tuning: Tuning, console: Console
) -> None:
    """The launches of dispatch and combine of as many tokens as there may be, and who says in how many parts.

    Args:
        group: whose.
        quantize: how dispatched rows travel.
        blocks: per kernel; None for what a buffer has by itself where each rank has a chip, or a core, alone.
        tuning: how operators are cut into parts, and who posts.
        console: to print to.

    Raises:
        ArgumentError: a buffer would refuse this.
    """
    chosen, capabilities = group.chosen(), CAPABILITIES[group.asked.backend]
    config = chosen.config.padded
    if blocks is None:
        blocks = SOCS[SOC_OF_PRODUCT[config.product]].vector_cores if group.asked.backend == "npu" else 1
    row_format = row_format_of(quantize)
    scheme_type(config).check_rows(row_format)
    check_tuning(tuning, config, blocks, capabilities)
    context = RankContext(config, 0, blocks, 60_000_000, capabilities, tuning=tuning)
    sizes = context.part_tokens
    _say_scheme(chosen, console)
    scheme, dtype, tokens = make_scheme(context), torch.bfloat16, config.num_max_tokens_per_rank
    given = torch.int32 if capabilities.is_asynchronous else None  # the host has copied them
    variants: tuple[Variant, ...] = (
        DispatchVariant(dtype, row_format, False, True, given_ids=given),
        CombineVariant(dtype, True),
    )
    for operator, variant in zip(sizes, variants, strict=True):
        parts, source = context.parts(operator, tokens), sizes[operator].source
        plan, uncut = scheme.whole(variant, 0, parts), scheme.whole(variant, 0)
        if parts > 1 and len(plan.launches) == len(uncut.launches):
            parts, source = 1, "it cannot be cut"
        say(f"{operator}: {parts} part{'s' if parts > 1 else ''} of {tokens} tokens; {source}", console)
        console.print(str(plan), markup=False)


def _say_scheme(chosen: ChosenScheme, console: Console) -> None:
    """Which scheme is taken and who says so, and the servers where there are several."""
    say(f"scheme {chosen.source}", console)
    if len(servers := chosen.config.topology.sizes) > 1:
        say(f"{len(servers)} servers of {', '.join(map(str, servers))} ranks", console)
