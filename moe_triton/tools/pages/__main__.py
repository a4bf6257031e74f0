"""Prints a page of the documentation: ``python -m moe_triton.tools.pages limits``, or ``arguments``."""

from __future__ import annotations

import argparse
import sys

from moe_triton.tools.pages import arguments, limits

PAGES = {"arguments": arguments.markdown, "limits": limits.markdown}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("page", choices=PAGES)
    sys.stdout.write(PAGES[parser.parse_args().page]())
