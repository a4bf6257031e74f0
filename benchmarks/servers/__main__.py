"""See `benchmarks.servers`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import parser, write_records
from benchmarks.servers.mapped import mapped
from benchmarks.servers.overlap import overlap
from benchmarks.servers.pace import pace
from benchmarks.servers.posts import posts


def main() -> None:
    """Measures one figure, and prints its table."""
    arguments = parser("Groups of several servers, which one machine plays.")
    arguments.add_argument("figure", choices=("pace", "posts", "mapped", "overlap"))
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--ranks-per-server", type=int, default=1, help="pace only")
    arguments.add_argument("--tokens", type=int, nargs="+", help="of each rank")
    arguments.add_argument("--topk", type=int, nargs="+", default=[2, 8], help="posts only")
    arguments.add_argument("--iterations", type=int, default=20)
    arguments.add_argument(
        "--slower", type=float, default=200.0, help="posts only: than A2's posts and links"
    )
    arguments.add_argument(
        "--wire", type=float, help="pace and overlap: link's time, of a call without link (6, and 1)"
    )
    arguments.add_argument("--plot", type=Path, help="posts only: draw into this folder")
    options = arguments.parse_args()
    found, iterations = [], options.iterations
    if options.figure == "pace":
        for tokens in options.tokens or [64]:
            found += pace(options.ranks, options.ranks_per_server, tokens, iterations, options.wire or 6.0)
    elif options.figure == "posts":
        for topk in options.topk:
            tokens = options.tokens or [1, 2, 4, 8, 16, 64, 256]
            found += posts(options.ranks, topk, tokens, options.iterations, options.slower, options.plot)
    elif options.figure == "overlap":
        for tokens in options.tokens or [64]:
            found += overlap(options.ranks, tokens, iterations, options.wire or 1.0)
    else:
        found += mapped(options.ranks, options.tokens or [16, 64, 256], options.iterations)
    write_records(options.json, found)


if __name__ == "__main__":
    main()
