"""The page of figures is what the model says today."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli.model.page import (
    BETWEEN_SERVERS,
    HIERARCHY,
    PICTURES,
    PRICES,
    SECTIONS,
    between_servers,
    hierarchies,
)

PRICED_PLANS = between_servers, hierarchies
DOCS = Path(__file__).resolve().parents[3] / "docs"


def sections_of(text: str) -> list[str]:
    """The page's, without the line break between two."""
    first, *others = (text.index(f"\n{heading}") for heading in (PRICES, BETWEEN_SERVERS, HIERARCHY))
    begins = [0, first + 1, *(begin + 1 for begin in others)]
    return [text[begin:end] for begin, end in zip(begins, [first, *others, None], strict=True)]


@pytest.mark.parametrize(
    "section",
    [pytest.param(each, marks=(pytest.mark.long,) if each in PRICED_PLANS else ()) for each in SECTIONS],
    ids=lambda section: section.__name__,
)
def test_the_page_of_figures_is_the_models(section: Callable[[], str]) -> None:
    written = sections_of((DOCS / "model-figures.md").read_text())
    assert written[SECTIONS.index(section)] == section(), "run: make docs"


@pytest.mark.parametrize("name", ["published.svg", "published_parts.svg"])
def test_its_pictures_are_there(name: str) -> None:
    assert (DOCS / PICTURES / name).read_text().lstrip().startswith("<?xml")
