"""Measures one figure of groups of several servers, which one machine plays."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import MAX_RANKS, at_least, more_than, parser, run_main, write_records
from benchmarks.servers.example import example
from benchmarks.servers.figures import hierarchy, mapped, overlap, pace, posts
from benchmarks.servers.traces import packing, stages

FIGURES = ("pace", "posts", "mapped", "overlap", "packing", "hierarchy", "stages", "example")


def main() -> None:
    """Measures one figure, and prints its table."""
    arguments = parser("Groups of several servers, which one machine plays.")
    arguments.add_argument("figure", choices=FIGURES)
    arguments.add_argument("--ranks", type=at_least(1, MAX_RANKS), help="by default 4, of hierarchy 8")
    arguments.add_argument(
        "--ranks-per-server",
        type=at_least(1, MAX_RANKS),
        help="pace, by default 1; hierarchy and stages, by default 2",
    )
    arguments.add_argument("--tokens", type=at_least(1), nargs="+", help="of each rank")
    arguments.add_argument("--topk", type=at_least(1), nargs="+", default=[2, 8], help="posts only")
    arguments.add_argument("--experts", type=at_least(1), default=32, help="hierarchy only")
    arguments.add_argument(
        "--limit",
        type=at_least(1),
        help="hierarchy only: servers that a token's experts lie in; any by default",
    )
    arguments.add_argument(
        "--factors",
        type=more_than(0),
        nargs="+",
        default=[0.25, 0.5, 1, 2, 3, 6, 12],
        help="stages, packing: the link's time, of what relay or send takes without a link",
    )
    arguments.add_argument("--iterations", type=at_least(1), default=20)
    arguments.add_argument(
        "--slower", type=more_than(0), default=200.0, help="posts only: than A2's posts and links"
    )
    arguments.add_argument(
        "--wire",
        type=more_than(0),
        help="link's time, of a call without link: pace, by default 6; overlap, 1; hierarchy, 10",
    )
    arguments.add_argument("--plot", type=Path, help="posts, hierarchy, stages: draw into this folder")
    arguments.add_argument("--trace", type=Path, help="stages, packing: keep the traces in this folder")
    options = arguments.parse_args()
    figures = []
    ranks, per_server, iterations = options.ranks or 4, options.ranks_per_server or 2, options.iterations
    by_tokens = {
        "pace": lambda tokens: pace(
            ranks, options.ranks_per_server or 1, tokens, iterations, options.wire or 6.0
        ),
        "overlap": lambda tokens: overlap(ranks, tokens, iterations, options.wire or 1.0),
        "packing": lambda tokens: packing(ranks, tokens, options.factors, iterations, options.trace),
        "stages": lambda tokens: stages(
            ranks // per_server, per_server, tokens, options.factors, iterations, options.plot, options.trace
        ),
    }
    if options.figure in by_tokens:
        for tokens in options.tokens or [64]:
            figures += by_tokens[options.figure](tokens)
    elif options.figure == "posts":
        for topk in options.topk:
            tokens = options.tokens or [1, 2, 4, 8, 16, 64, 256]
            figures += posts(ranks, topk, tokens, iterations, options.slower, options.plot)
    elif options.figure == "hierarchy":
        servers, tokens = (options.ranks or 8) // per_server, options.tokens or [16, 64, 256]
        routing = options.experts, options.limit
        wire = options.wire or 10.0
        figures += hierarchy(servers, per_server, tokens, *routing, iterations, wire, options.plot)
    elif options.figure == "example":
        figures += example()
    else:
        figures += mapped(ranks, options.tokens or [16, 64, 256], iterations)
    write_records(options.json, figures)


if __name__ == "__main__":
    run_main(main)
