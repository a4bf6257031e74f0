"""The page of figures is what the model says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_triton.tools.cli.model.page import PICTURES, page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_figures_is_the_models() -> None:
    written = (DOCS / "model-figures.md").read_text()
    assert written == page(), "run: make docs"


@pytest.mark.parametrize("name", ["published.svg", "published_parts.svg"])
def test_its_pictures_are_there(name: str) -> None:
    assert (DOCS / PICTURES / name).read_text().lstrip().startswith("<?xml")
