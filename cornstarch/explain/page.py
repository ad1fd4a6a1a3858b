"""A story as one HTML page: all steps as drawings, of which the script shows one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from markupsafe import Markup

from cornstarch.explain.story import Arrow, DiagramRow, Story, StoryStep, describe_sent, format_byte_count
from cornstarch.report.html import Table, build_element, render_page

_LETTER = 6.3  # the width of a letter in a box
_SMALL = 5.4  # and of one beside a row
_NARROW = 300  # of all boxes together, at least
_BOX, _BETWEEN, _HEAD, _EDGE = 26, 18, 18, 3
_FAR = 12  # more room over the first row for arrows that come from the last
_SHRINKS = 0.86  # the least size on a narrow screen, as a fraction of the natural one; below that it scrolls
_GROWS = 1.7


def render(story: Story) -> str:
    """Render the page."""
    diagram = StepDiagram(story.steps)
    columns = ["what", "formula", "with numbers", "is#", "counted step by step#"]
    total = ", ".join(f"rank {rank}: {format_byte_count(count)}" for rank, count in enumerate(story.sent))
    return render_page(
        "explain.html",
        title=story.title,
        sections=[],
        story=story,
        steps=[(step, diagram.draw(step), describe_sent(step.sent)) for step in story.steps],
        formulas=Table(columns, [astuple(one) for one in story.formulas], "Formulas"),
        remarks=[f"Sent by {total}.", *story.remarks],
    )


class StepDiagram:
    """Draws steps as SVG: rows of boxes with names before them and arrows between them, all in the same scale."""

    def __init__(self, steps: Sequence[StoryStep]) -> None:
        rows = [row for step in steps for row in step.rows]
        boxes = [box for row in rows for box in row.boxes] + [box for step in steps for box in step.head]
        self.units = max(box.end for box in boxes)
        # The same sizes in all steps, so that nothing jumps: every text has room in its box, every name before its row.
        needed = max((len(box.text) * _LETTER + 8) / (box.end - box.start) for box in boxes)
        self.unit = max(needed, _NARROW / self.units)
        self.left = max(max(len(row.name) * _LETTER, len(row.beside) * _SMALL) for row in rows) + 10
        self.width = self.left + self.units * self.unit + 2 * _EDGE
        self.has_far_arrows = any(abs(one.target - one.source) > 1 for step in steps for one in step.arrows)

    def draw(self, step: StoryStep) -> Markup:
        """Return the drawing of a step."""
        top = (_HEAD if step.head else 2) + (_FAR if self.has_far_arrows else 0)
        height = top + len(step.rows) * (_BOX + _BETWEEN) - _BETWEEN + 14
        content: list[str] = [
            build_element("text", box.text, x=f"{self._x((box.start + box.end) / 2):.1f}", y=11, class_="over")
            for box in step.head
        ]
        for number, row in enumerate(step.rows):
            content += self._draw_row(row, top + number * (_BOX + _BETWEEN))
        content += [line for arrow in step.arrows for line in self._draw_arrow(arrow, top)]
        return build_element(
            "svg",
            content,
            viewBox=f"0 0 {self.width:.0f} {height:.0f}",
            role="img",
            aria_label=f"{step.title}. {step.description}",
            style=f"min-width:{_SHRINKS * self.width:.0f}px;max-width:{_GROWS * self.width:.0f}px",
        )

    def _x(self, place: float) -> float:
        return self.left + _EDGE + place * self.unit

    def _draw_row(self, row: DiagramRow, y: float) -> Iterator[Markup]:
        yield build_element("text", row.name, x=0, y=y + 12, class_="rank")
        if row.beside:
            yield build_element("text", row.beside, x=0, y=y + 24, class_="beside")
        width = f"{self.units * self.unit:.1f}"
        yield build_element("rect", x=f"{self._x(0):.1f}", y=y, width=width, height=_BOX, rx=3, class_="lane")
        for box in row.boxes:
            left, right = self._x(box.start) + 1, self._x(box.end) - 1
            middle, width = f"{(left + right) / 2:.1f}", f"{right - left:.1f}"
            yield build_element(
                "g",
                build_element("title", box.tooltip) if box.tooltip else None,
                build_element("rect", x=f"{left:.1f}", y=y + 1, width=width, height=_BOX - 2, rx=3, class_="cell"),
                build_element("text", box.text, x=middle, y=y + _BOX / 2 + 4) if box.text else None,
                class_=f"{box.tone} {'fresh' if box.fresh else 'kept'}",
            )

    def _draw_arrow(self, arrow: Arrow, top: float) -> Iterator[Markup]:
        """Yield an arrow to a neighbouring row; for a row further away, two stubs where it leaves and arrives."""
        x = self._x(arrow.at)
        pitch = _BOX + _BETWEEN
        down = arrow.target > arrow.source
        if abs(arrow.target - arrow.source) == 1:
            shift = 0 if down else 5  # two arrows may go both ways between the same rows
            begin = top + arrow.source * pitch + (_BOX if down else 0)
            end = top + arrow.target * pitch + (0 if down else _BOX)
            yield _draw_line(x + shift, begin + (2 if down else -2), end + (-2 if down else 2))
            return
        leaves, comes = top + arrow.source * pitch + _BOX, top + arrow.target * pitch
        yield _draw_line(x, leaves + 2, leaves + 12, "far")
        yield _draw_line(x, comes - 12, comes - 2, "far")


def _draw_line(x: float, begin: float, end: float, kind: str = "near") -> Markup:
    back = -4 if end > begin else 4
    path = f"M{x:.1f} {begin:.1f}V{end:.1f}m-3.5 {back}L{x:.1f} {end:.1f}l3.5 {back}"
    return build_element("path", d=path, class_=f"arrow {kind}")
