"""What a batch handler has done in a partition: positions as ascending, disjoint intervals [a, b). Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

MAX_INTERVALS = 256  # beyond, the lowest are forgotten, if the log cannot bring them any more

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
    # From the top: what is asked for was delivered lately, and is near it.
    for a, b in reversed(done):
        if position >= a:
            return position < b
    return False


def add(done: Done, positions: Iterable[int]) -> Done:
    """With these positions done as well."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted((*done, *_runs(sorted(positions)))):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def pruned(done: Done, settled: int) -> Done:
    """No more intervals than MAX_INTERVALS, as far as those below the settled watermark can spare.

    What lies between two intervals is dead, parked, or a hole in the log; gaps are never closed, for an event in the
    aside that is taken for done is lost. What is below the settled watermark the log does not bring again.
    """
    if len(done) <= MAX_INTERVALS:
        return done
    spare = sum(b <= settled for _, b in done)
    return done[min(spare, len(done) - MAX_INTERVALS // 2) :]


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending positions as intervals; most batches are one."""
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
