"""python -m bench.bars RESULTS.json: draw docs/plots/kafka-peers.svg from what `python -m bench kafka --json` wrote."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.plot import COLOURS, FONT, INK, text

WIDTH, LEFT, RIGHT, TOP, ROW = 720, 210, 120, 64, 40
FAINT = f"{INK}90"
NOTE = "A typed handler that does nothing: 8 partitions, 2,000 keys, 100,000 events. All processes share two cores."
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
        text(16, 26, "Events per second on Kafka, key order", size=16, weight=600),
        text(16, 46, NOTE, size=12),
    ]
    for row, (name, rate) in enumerate(rows.items()):
        parts += _bar(TOP + ROW * row, name, rate, rate / most, COLOURS[0] if row == 0 else FAINT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(y: int, name: str, rate: float, share: float, colour: str) -> Sequence[str]:
    width = max(2.0, round(share * (WIDTH - LEFT - RIGHT), 1))
    weight = 600 if share == 1 else 400
    return [
        text(LEFT - 12, y + 23, name, size=14, weight=weight, anchor="end"),
        f'<rect x="{LEFT}" y="{y + 6}" width="{width}" height="24" rx="4" fill="{colour}"/>',
        text(LEFT + width + 10, y + 23, f"{rate:,.0f}/s", size=14, weight=weight),
    ]


if __name__ == "__main__":
    TARGET.write_text(svg(rates(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Results))), encoding="utf-8")
    print(f"wrote docs/plots/{TARGET.name}")
