"""The positions of a partition that a batch handler has done, as ascending, disjoint intervals [a, b). Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

MAX_INTERVALS = 256  # beyond, the lowest are removed, if the log can no longer deliver them

Done = tuple[tuple[int, int], ...]


def decode(text: str) -> Done:
    """From the stored text, such as `0-120 125-126`."""
    done = tuple(_interval(part) for part in text.split())
    assert all(a < b for a, b in done), text
    assert all(left[1] < right[0] for left, right in pairwise(done)), text
    return done


def encode(done: Done) -> str:
    return " ".join(f"{a}-{b}" for a, b in done)


def contains(done: Done, position: int) -> bool:
    # From the top: the position belongs to a recent delivery, so it is near the top.
    for a, b in reversed(done):
        if position >= a:
            return position < b
    return False


def add(done: Done, positions: Iterable[int]) -> Done:
    """The intervals with these positions added."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted((*done, *_runs(sorted(positions)))):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def pruned(done: Done, settled: int) -> Done:
    """Reduce the intervals to MAX_INTERVALS, by removing only intervals below the settled watermark.

    The log does not deliver these positions again. Gaps between intervals are never closed. Their events are dead,
    parked, or holes in the log, and an event in the aside that counted as done would be lost.
    """
    if len(done) <= MAX_INTERVALS:
        return done
    spare = sum(b <= settled for _, b in done)
    return done[min(spare, len(done) - MAX_INTERVALS // 2) :]


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending positions as intervals. Most batches are one interval."""
    if not ordered:
        return
    start = end = ordered[0]
    if ordered[-1] - start == len(set(ordered)) - 1:
        yield start, ordered[-1] + 1
        return
    for position in ordered:
        if position > end:
            yield start, end
            start = position
        end = position + 1
    yield start, end


def _interval(part: str) -> tuple[int, int]:
    a, b = part.split("-")
    return int(a), int(b)
