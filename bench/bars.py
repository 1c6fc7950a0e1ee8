"""python -m bench.bars RESULTS.json: draw docs/plots/kafka-peers.svg from what `python -m bench kafka --json` wrote."""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median

import msgspec

from bench.plot import COLOURS, FONT, INK

WIDTH, LEFT, RIGHT, TOP, ROW = 720, 210, 120, 64, 40
FAINT = f"{INK}90"
WHAT = "Kafka, typed no-op, key order"
PEERS = ("Confluent Parallel Consumer", "FastStream", "pyrallel-consumer")
TARGET = Path(__file__).parent.parent / "docs/plots/kafka-peers.svg"


class Figure(msgspec.Struct):
    what: str
    samples: Mapping[str, Sequence[float]] = {}


class Results(msgspec.Struct):
    figures: Sequence[Figure]


def rates(results: Results) -> Mapping[str, float]:
    """Events per second, the median of the rounds: Onward, then its peers."""
    found: dict[str, float] = {}
    for figure in results.figures:
        if figure.what == WHAT:
            found |= {name: median(samples) for name, samples in figure.samples.items()}
    return {"Onward": found["onward"]} | {name: found[name] for name in PEERS if name in found}


def svg(rows: Mapping[str, float]) -> str:
    height = TOP + ROW * len(rows) + 16
    most = max(rows.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" {FONT}>',
        "<title>Events per second on Kafka</title>",
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="{INK}">Events per second on Kafka, key order</text>',
        f'<text x="16" y="46" font-size="12" fill="{INK}">Typed handler that does nothing. 8 partitions, 2,000 keys, '
        "100,000 events, broker and consumer on two cores.</text>",
    ]
    for row, (name, rate) in enumerate(rows.items()):
        parts += _bar(TOP + ROW * row, name, rate, rate / most, COLOURS[0] if row == 0 else FAINT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(y: int, name: str, rate: float, share: float, colour: str) -> Sequence[str]:
    width = round(share * (WIDTH - LEFT - RIGHT), 1)
    weight = 600 if share == 1 else 400
    return [
        f'<text x="{LEFT - 12}" y="{y + 23}" text-anchor="end" font-size="14" font-weight="{weight}" fill="{INK}">'
        f"{escape(name)}</text>",
        f'<rect x="{LEFT}" y="{y + 6}" width="{max(width, 2)}" height="24" rx="4" fill="{colour}"/>',
        f'<text x="{LEFT + max(width, 2) + 10}" y="{y + 23}" font-size="14" font-weight="{weight}" fill="{INK}">'
        f"{rate:,.0f}/s</text>",
    ]


if __name__ == "__main__":
    TARGET.write_text(svg(rates(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Results))), encoding="utf-8")
    print(f"wrote docs/plots/{TARGET.name}")
