"""Tables for people, described once: for a terminal of any width, for pipes and files, and in Markdown.

No name and no number is ever cut. A table that is wider than the terminal breaks its texts between words; if
that is not enough, it says once, below, what is the same in all rows; then it leaves out columns that its
caller can spare, and says which; and if that is not enough either, each row is a block of lines with one cell
each. A pipe or a file has no width: it gets whole rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from moe_triton.tools import markdown

Kind = Literal["name", "number", "text"]

GAP = 2  # between columns
LEAST_TEXT = 16  # characters of a column of texts: narrower ones are hard to read
HEADING = "bold"
MANY_BLOCKS = 3
"""Rows that are shown as blocks without a word on how to see them as rows."""
NO_WIDTH = 1 << 20


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        heading: what stands above it.
        kind: names and numbers stay in one line, numbers to the right; texts break between words.
        spare: when a table is too wide, columns with the highest go first; those with 0 stay.
        alone: its heading where the columns beside it do not say what it is of; empty for the same.
        code: in Markdown its cells are code.
    """

    heading: str
    kind: Kind
    spare: int = 0
    alone: str = ""
    code: bool = False

    @property
    def label(self) -> str:
        """Its heading by itself."""
        return self.alone or self.heading


def names(heading: str, *, spare: int = 0, alone: str = "", code: bool = False) -> Column:
    """A column of names, which stay whole."""
    return Column(heading, "name", spare, alone, code)


def numbers(heading: str, *, spare: int = 0, alone: str = "") -> Column:
    """A column of numbers, with their units if they have any."""
    return Column(heading, "number", spare, alone)


def texts(heading: str, *, spare: int = 0, alone: str = "") -> Column:
    """A column of words."""
    return Column(heading, "text", spare, alone)


@dataclass(frozen=True)
class TextTable:
    """Rows under columns.

    Attributes:
        columns: what they are.
        rows: a cell for each column: anything with a text, or a `rich.text.Text` in colour.
        title: a line above.
        more: what shows all columns beside a wider terminal, as "--json".
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    title: str = ""
    more: str = ""

    def print(self, console: Console) -> None:
        """Prints it as wide as the console is, or whole rows where nobody says how wide that is."""
        for line in self.lines(width_of(console)):
            console.print(line, soft_wrap=True, highlight=False)

    def lines(self, width: int | None) -> list[Text]:
        """The lines that are printed.

        Args:
            width: in characters; None for as wide as it takes.
        """
        cells = [[_text(cell) for cell in row] for row in self.rows]
        title = _wrapped(Text(self.title, style=HEADING), width or NO_WIDTH) if self.title else []
        for shown in self._choices():
            widths = self._widths(shown, cells, width or NO_WIDTH)
            if widths is not None:
                grid, rest = self._grid(shown, widths, cells), self._rest(shown, cells, width or NO_WIDTH)
                return [*title, *grid, *rest]
        return [*title, *self._blocks(cells, width or NO_WIDTH)]

    def markdown(self, *, aligned: bool = False) -> str:
        """The table in Markdown, without its title.

        Args:
            aligned: numbers stand to the right.
        """
        rows = [
            [f"`{cell}`" if column.code else cell for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        right = [column.kind == "number" for column in self.columns] if aligned else ()
        return markdown.table([column.heading for column in self.columns], rows, right)

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Columns to show: all of them, then fewer."""
        shown = tuple(range(len(self.columns)))
        yield shown
        shown = tuple(index for index in shown if not self._is_the_same(index))
        yield shown
        for spare in sorted({column.spare for column in self.columns} - {0}, reverse=True):
            shown = tuple(index for index in shown if self.columns[index].spare < spare)
            yield shown

    def _widths(self, shown: Sequence[int], cells: Sequence[Sequence[Text]], width: int) -> list[int] | None:
        """The widths of the columns that are shown; None if they do not fit."""
        least = [self._narrowest(index, cells) for index in shown]
        room = width - GAP * (len(shown) - 1)
        if sum(least) > room:
            return None
        natural = [
            max(cell_len(self.columns[index].heading), *(row[index].cell_len for row in cells), 0)
            for index in shown
        ]
        return _shared(least, natural, room)

    def _narrowest(self, index: int, cells: Sequence[Sequence[Text]]) -> int:
        """How narrow a column may be."""
        column = self.columns[index]
        return max(_longest_word(column.heading), *(self._least(column, row[index]) for row in cells), 0)

    def _grid(
        self, shown: Sequence[int], widths: Sequence[int], cells: Sequence[Sequence[Text]]
    ) -> Iterator[Text]:
        """Headings, a rule, rows."""
        headings = [Text(self.columns[index].heading, style=HEADING) for index in shown]
        yield from self._row(shown, widths, headings, at_bottom=True)
        yield Text("-" * (sum(widths) + GAP * (len(widths) - 1)))
        for row in cells:
            yield from self._row(shown, widths, [row[index] for index in shown])

    def _row(
        self, shown: Sequence[int], widths: Sequence[int], row: Sequence[Text], *, at_bottom: bool = False
    ) -> Iterator[Text]:
        columns = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, columns), default=1)
        blank = [Text()]
        for column in columns:
            missing = blank * (height - len(column))
            column[:] = missing + column if at_bottom else column + missing
        for line in zip(*columns, strict=True):
            made = Text()
            for index, width, cell in zip(shown, widths, line, strict=True):
                space = " " * (width - cell.cell_len)
                made += Text(space) + cell if self.columns[index].kind == "number" else cell + Text(space)
                made += Text(" " * GAP)
            made.rstrip()
            yield made

    def _is_the_same(self, index: int) -> bool:
        """Whether a column says the same in all rows; never the first one, and never a column of texts."""
        values = {str(row[index]) for row in self.rows}
        return index > 0 and self.columns[index].kind != "text" and len(self.rows) > 1 and len(values) == 1

    def _rest(self, shown: Sequence[int], cells: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
        """What the columns that are not shown say, if that is the same in all rows; or what shows them."""
        hidden = [index for index in range(len(self.columns)) if index not in shown]
        same = [
            f"{self.columns[index].label} {cells[0][index].plain}"
            for index in hidden
            if self._is_the_same(index) and cells[0][index].plain
        ]
        if same:
            yield from _wrapped(Text(f"In all rows: {', '.join(same)}."), width)
        missing = [self.columns[index].label for index in hidden if not self._is_the_same(index)]
        if missing:
            said = f"Not shown: {', '.join(missing)}. Shown by: {self._shows(cells)}."
            yield from _wrapped(Text(said), width)

    def _shows(self, cells: Sequence[Sequence[Text]]) -> str:
        """What shows all columns."""
        number = len(self.columns)
        wide = sum(self._narrowest(index, cells) for index in range(number)) + GAP * (number - 1)
        return ", ".join(each for each in (f"{wide} columns", "a pipe (| less -S)", self.more) if each)

    def _blocks(self, cells: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
        """A block of lines for each row: its cells beside their headings, or below long ones."""
        labels = [cell_len(column.label) for column in self.columns]
        beside = max((label for label in labels if 2 * label <= width), default=0) + GAP
        for number, row in enumerate(cells):
            if number:
                yield Text()
            for column, cell in zip(self.columns, row, strict=True):
                if cell.plain:
                    yield from self._labelled(column, cell, beside, width)
        if len(cells) > MANY_BLOCKS:
            yield Text()
            yield from _wrapped(Text(f"Whole rows: {self._shows(cells)}."), width)

    def _labelled(self, column: Column, cell: Text, beside: int, width: int) -> Iterator[Text]:
        """One cell of a block.

        Args:
            column: of the cell.
            cell: its text.
            beside: where cells begin that stand beside their headings.
            width: of lines.
        """
        label, whole = Text(column.label, style=HEADING), column.kind != "text"
        begin = max(beside, label.cell_len + GAP)
        if begin + (self._least(column, cell) if begin == beside else cell.cell_len) <= width:
            label += Text(" " * (begin - label.cell_len))
            for line in _wrapped(cell, width - begin, whole=whole):
                yield label + line
                label = Text(" " * begin)
            return
        if label.plain:
            yield from _wrapped(label, width)
        yield from _wrapped(cell, width, whole=whole)

    @staticmethod
    def _least(column: Column, cell: Text) -> int:
        """How narrow a cell may be."""
        if column.kind != "text":
            return cell.cell_len
        return max(min(cell.cell_len, LEAST_TEXT), _longest_word(cell.plain))


def width_of(console: Console) -> int | None:
    """How wide a console is; None for a pipe or a file that nobody has given a width."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def print_parts(parts: Iterable[TextTable | str], console: Console, as_markdown: bool = False) -> None:
    """Prints tables and paragraphs, with blank lines between.

    Args:
        parts: in order.
        console: to print to.
        as_markdown: as they stand in a page.
    """
    if as_markdown:
        console.print(markdown_of(parts), markup=False, highlight=False, soft_wrap=True)
        return
    for index, part in enumerate(parts):
        if index:
            console.print()
        if isinstance(part, TextTable):
            part.print(console)
        else:
            say(part, console)


def say(paragraph: str, console: Console) -> None:
    """Prints lines that break between words only, and in a pipe nowhere."""
    for line in paragraph.splitlines():
        for piece in _wrapped(Text(line), width_of(console) or NO_WIDTH) or [Text()]:
            console.print(piece, soft_wrap=True, highlight=False)


def markdown_of(parts: Iterable[TextTable | str]) -> str:
    """The same in Markdown, without a line break at its end."""
    return "\n\n".join(part.markdown() if isinstance(part, TextTable) else part for part in parts)


def _text(cell: object) -> Text:
    """A cell in one line."""
    if isinstance(cell, Text):
        return cell
    return Text(" ".join(str(cell).split()))


def _longest_word(words: str) -> int:
    return max(map(cell_len, words.split()), default=0)


def _wrapped(cell: Text, width: int, *, whole: bool = False) -> list[Text]:
    """A cell as lines of at most this width, broken between words; a longer word stays whole."""
    if whole or cell.cell_len <= width:
        return [cell]
    lines: list[list[str]] = [[]]
    for word in cell.plain.split():
        if lines[-1] and cell_len(" ".join([*lines[-1], word])) > width:
            lines.append([])
        lines[-1].append(word)
    return [Text(" ".join(words), style=cell.style) for words in lines]


def _shared(least: Sequence[int], natural: Sequence[int], width: int) -> list[int]:
    """Widths that together fit: the column that is furthest from its natural width grows next."""
    widths = list(least)
    while sum(widths) < width and widths != list(natural):
        furthest = max(range(len(widths)), key=lambda index: natural[index] / max(widths[index], 1))
        widths[furthest] += 1
    return widths
