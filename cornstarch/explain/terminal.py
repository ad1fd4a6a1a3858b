"""An explanation on a terminal, step by step."""

from __future__ import annotations

import re
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cornstarch.explain.story import Story, StoryStep, describe_sent

_STYLES = {  # by tone
    "c1": "green", "c2": "dark_orange", "c3": "medium_purple", "c4": "magenta", "c5": "yellow", "c6": "dodger_blue1",
    "n": "dim", "f": "dodger_blue1", "b": "green", "i": "medium_purple", "w": "yellow",
}  # fmt: skip
_ACTIONS = re.compile(r"\b([FBIW])\d+(?:@\d+)?-*")


def show(story: Story, console: Console, only: int | None = None) -> None:
    """Print all steps, or the step with the number `only` (from 1), and the formulas."""
    console.print(Text(story.title, style="bold"))
    console.print(Text(story.lead))
    if story.legend:
        console.print(Text("  ").join(Text(f"■ {meaning}", style=_STYLES[tone]) for tone, meaning in story.legend))
    for number, step in enumerate(story.steps, 1):
        if only not in (None, number):
            continue
        console.print()
        console.print(Text.assemble((f"{number}/{len(story.steps)} ", "dim"), (step.title, "bold")))
        console.print(Text(step.description))
        for line in fold_timeline(step.text, console.width).splitlines() if step.text else ():
            text = Text(line)
            for found in _ACTIONS.finditer(line):
                text.stylize(_STYLES[found[1].lower()], *found.span())
            console.print(text, no_wrap=True, crop=False)
        if not step.text:
            console.print(_build_table(step))
        if sent := describe_sent(step.sent):
            console.print(Text(sent, style="dim"))
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("", "formula", "with numbers", "is", "counted step by step"):
        table.add_column(name, overflow="fold")
    for one in story.formulas:
        table.add_row(one.name, one.symbols, one.numbers, one.result, one.counted)
    console.print()
    console.print(table)
    for remark in story.remarks:
        console.print(Text(remark, style="dim"))


def fold_timeline(text: str, width: int) -> str:
    """Return the text of a timeline in blocks no wider than the terminal, each with the names before it."""
    lines = text.splitlines()
    first = re.match(r"^(.*?\d+)  ", lines[0])
    if first is None or max(map(len, lines)) <= width:
        return text
    name = max(len(found[1]) for line in lines if (found := re.match(r"^(.*?\d+)(?=  )", line))) + 2
    column = max((len(found[0].rstrip("-")) for found in _ACTIONS.finditer(text)), default=1) + 1
    room = max(1, (width - name) // column) * column
    blocks = [
        "\n".join((line[:name] + line[at : at + room]).rstrip() for line in lines)
        for at in range(name, max(map(len, lines)), room)
    ]
    return "\n\n".join(blocks)


def _build_table(step: StoryStep) -> Table:
    """Return the boxes as a table: a column for each header, or for each box of a row if there are none."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    heads = step.head or [replace(cell, text="") for cell in step.rows[0].boxes]
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head.text, overflow="fold")
    table.add_column("", no_wrap=True)
    for row in step.rows:
        cells = []
        for head in heads:
            inside = [cell for cell in row.boxes if head.start <= cell.start < head.end]
            wide = max((len(cell.text) for cell in inside), default=0) if len(inside) > 1 else 0
            texts = []
            for cell in inside:
                style = (_STYLES[cell.tone] if cell.text else "dim") + (" bold" if cell.fresh else "")
                texts.append(Text(f"{cell.text or '·':{wide}}", style=style))
            cells.append(Text(" ").join(texts))
        table.add_row(row.name, *cells, Text(row.beside, style="dim"))
    return table
