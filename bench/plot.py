"""Line charts as SVG, in colours that are readable on white and on black."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import msgspec

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 92, 56
INK, GRID = "#7d8590", "#7d859040"
FONT = 'font-family="system-ui, sans-serif"'
COLOURS = ("#2f81f7", "#db6d28", "#3fa34d", "#a371f7")

Point = tuple[float, float]


class Axis(msgspec.Struct, frozen=True):
    label: str
    log: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    note: str
    x: Axis
    y: Axis
    lines: Mapping[str, Sequence[Point]]


def draw(chart: Chart, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(chart), encoding="utf-8")


def svg(chart: Chart) -> str:
    points = [point for line in chart.lines.values() for point in line]
    across = _Scale(chart.x, [x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = _Scale(chart.y, [y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {FONT}>',
        f"<title>{escape(chart.title)}</title>",
        text(LEFT, 22, chart.title, size=16, weight=600),
        text(LEFT, 42, chart.note, size=12),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, chart.x.label, anchor="middle"),
        text(LEFT, TOP - 14, chart.y.label, size=12),
        *_grid(across, up),
    ]
    for row, (name, line) in enumerate(chart.lines.items()):
        parts += _line([(across.at(x), up.at(y)) for x, y in line], COLOURS[row])
        parts.append(text(WIDTH - RIGHT, 60 + 18 * row, f"● {name}", anchor="end", colour=COLOURS[row], weight=600))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Maps a value to its place between two edges."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self._log = axis.log
        self._low, self._high = low, high
        self.ticks = sorted(set(values)) if axis.log else _round_ticks(max(values))
        self._from, self._to = self._turn(self.ticks[0]), self._turn(self.ticks[-1])

    def at(self, value: float) -> float:
        share = (self._turn(value) - self._from) / ((self._to - self._from) or 1)
        return round(self._low + share * (self._high - self._low), 1)

    def _turn(self, value: float) -> float:
        return math.log2(1 + value) if self._log else value


def _round_ticks(most: float) -> list[float]:
    """Ticks from 0 to above the largest value, in four to eight round steps."""
    step = 10 ** math.floor(math.log10(most / 4)) if most else 1.0
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if most / (step * factor) <= 6)
    return [step * number for number in range(math.ceil(most / step) + 1)]


def _grid(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for value in up.ticks:
        y = up.at(value)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 8, y + 4, _number(value), anchor="end"))
    below = [text(across.at(value), HEIGHT - BOTTOM + 20, _number(value), anchor="middle") for value in across.ticks]
    return parts + below


def _line(places: Sequence[Point], colour: str) -> list[str]:
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    dots = [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
    return [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>', *dots]


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, colour: str = INK, weight: int = 400
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
        f"{escape(words)}</text>"
    )


def _number(value: float) -> str:
    return f"{value / 1000:,.6g}k" if value >= 1_000 and value % 500 == 0 else f"{value:,.6g}"
