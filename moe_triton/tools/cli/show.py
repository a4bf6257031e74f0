"""``moe-triton layout`` and ``moe-triton plan``: print layouts and plans."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.row_formats import ROW_FORMATS, row_format_of
from moe_triton.limits import check_config
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes import layout_of, make_scheme
from moe_triton.schemes.site import Site


def show_layout(config: Config, console: Console) -> None:
    """Every region of a window: base, and extent x stride of each dimension."""
    if not _good(config, console):
        return
    layout = layout_of(config)
    table = Table(
        title=f"window of {layout.window_bytes} bytes, data {layout.data_bytes}, zone {layout.zone_bytes}"
    )
    for column in ("region", "base", "item bytes", "dimensions (extent x stride)", "end"):
        table.add_column(column)
    for region in layout.regions:
        dims = ", ".join(f"{dim.name} {dim.extent} x {dim.stride}" for dim in region.dims)
        table.add_row(region.name, str(region.base), str(region.item_bytes), dims, str(region.end))
    console.print(table)


def show_plans(config: Config, quantize: str | None, target: str, console: Console) -> None:
    """The launches of dispatch and combine."""
    if not _good(config, console, quantize):
        return
    scheme = make_scheme(Site(config, rank=0, num_blocks=1, timeout_us=60_000_000, target=target))
    dtype = torch.bfloat16
    console.print(
        str(scheme.whole(DispatchVariant(dtype, ROW_FORMATS[quantize], False, True), zone=0)), markup=False
    )
    console.print(str(scheme.whole(CombineVariant(dtype, True), zone=0)), markup=False)


def _good(config: Config, console: Console, quantize: str | None = None) -> bool:
    try:
        check_config(config)
        row_format_of(quantize, config.hidden)
    except ArgumentError as error:
        console.print(f"[red]{error}[/red]")
        return False
    return True
