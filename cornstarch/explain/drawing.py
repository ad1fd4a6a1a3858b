"""A step as SVG: rows of boxes, arrows between them, names before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cornstarch.explain.story import Arrow, Box, Row, Step
from cornstarch.report.markup import Markup, element

_LETTER = 6.3  # the width of a letter in a box
_SMALL = 5.4  # and of one beside a row
_NARROW = 300  # of all boxes together, at least
_BOX, _BETWEEN, _HEAD, _EDGE = 26, 18, 18, 3
_FAR = 12  # more room over the first row for arrows that come from the last
_SHRINKS = 0.86  # the least size on a narrow screen, as a share of the natural one; then it scrolls
_GROWS = 1.7


def unit_of(steps: Sequence[Step]) -> float:
    """Return the width of a unit such that the text of every box of all steps has room in it."""
    boxes = [box for step in steps for row in step.rows for box in row.boxes]
    boxes += [box for step in steps for box in step.head]
    needed = max((len(box.text) * _LETTER + 8) / (box.end - box.start) for box in boxes)
    wide = max(box.end for box in boxes)
    return max(needed, _NARROW / wide)


def left_of(steps: Sequence[Step]) -> float:
    """Return the room for the names of rows, the same in all steps so that nothing jumps."""
    names = [len(row.name) * _LETTER for step in steps for row in step.rows]
    beside = [len(row.beside) * _SMALL for step in steps for row in step.rows]
    return max(*names, *beside) + 10


def wide_of(steps: Sequence[Step]) -> float:
    """Return the last place at which anything ends, in units."""
    ends = [box.end for step in steps for row in step.rows for box in row.boxes]
    return max(ends + [box.end for step in steps for box in step.head])


class Canvas:
    """The sizes that all pictures of a story share."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.unit, self.left, self.units = unit_of(steps), left_of(steps), wide_of(steps)
        self.goes_far = any(abs(one.target - one.source) > 1 for step in steps for one in step.arrows)
        self.width = self.left + self.units * self.unit + 2 * _EDGE

    def draw(self, step: Step) -> Markup:
        """Return the picture of a step."""
        top = (_HEAD if step.head else 2) + (_FAR if self.goes_far else 0)
        height = top + len(step.rows) * (_BOX + _BETWEEN) - _BETWEEN + 14
        content: list[str] = [
            element("text", box.text, x=f"{self._x((box.start + box.end) / 2):.1f}", y=11, class_="over")
            for box in step.head
        ]
        for number, row in enumerate(step.rows):
            content += self._row(row, top + number * (_BOX + _BETWEEN))
        content += [line for arrow in step.arrows for line in self._arrow(arrow, top)]
        return element(
            "svg",
            content,
            viewBox=f"0 0 {self.width:.0f} {height:.0f}",
            role="img",
            aria_label=f"{step.title}. {step.says}",
            style=f"min-width:{_SHRINKS * self.width:.0f}px;max-width:{_GROWS * self.width:.0f}px",
        )

    def _x(self, place: float) -> float:
        return self.left + _EDGE + place * self.unit

    def _row(self, row: Row, y: float) -> Iterator[Markup]:
        yield element("text", row.name, x=0, y=y + 12, class_="rank")
        if row.beside:
            yield element("text", row.beside, x=0, y=y + 24, class_="beside")
        yield element(
            "rect", x=f"{self._x(0):.1f}", y=y, width=f"{self.units * self.unit:.1f}", height=_BOX, rx=3, class_="lane"
        )
        for box in row.boxes:
            yield self._box(box, y)

    def _box(self, box: Box, y: float) -> Markup:
        left, right = self._x(box.start) + 1, self._x(box.end) - 1
        return element(
            "g",
            element("title", box.said) if box.said else None,
            element(
                "rect", x=f"{left:.1f}", y=y + 1, width=f"{right - left:.1f}", height=_BOX - 2, rx=3, class_="cell"
            ),
            element("text", box.text, x=f"{(left + right) / 2:.1f}", y=y + _BOX / 2 + 4) if box.text else None,
            class_=f"{box.tone} {'fresh' if box.fresh else 'kept'}",
        )

    def _arrow(self, arrow: Arrow, top: float) -> Iterator[Markup]:
        """Yield an arrow to a neighbouring row; to one further away, what leaves the one and comes to the other."""
        x = self._x(arrow.at)
        pitch = _BOX + _BETWEEN
        down = arrow.target > arrow.source
        if abs(arrow.target - arrow.source) == 1:
            shift = 0 if down else 5  # two may go both ways between the same rows
            begin = top + arrow.source * pitch + (_BOX if down else 0)
            end = top + arrow.target * pitch + (0 if down else _BOX)
            yield _line(x + shift, begin + (2 if down else -2), end + (-2 if down else 2))
            return
        leaves, comes = top + arrow.source * pitch + _BOX, top + arrow.target * pitch
        yield _line(x, leaves + 2, leaves + 12, "far")
        yield _line(x, comes - 12, comes - 2, "far")


def _line(x: float, begin: float, end: float, kind: str = "near") -> Markup:
    """Return a straight arrow with its point at the end."""
    back = -4 if end > begin else 4
    path = f"M{x:.1f} {begin:.1f}V{end:.1f}m-3.5 {back}L{x:.1f} {end:.1f}l3.5 {back}"
    return element("path", d=path, class_=f"arrow {kind}")
