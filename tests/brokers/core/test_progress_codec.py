import random
import re
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from onward.brokers.base import Progress, Tries
from onward.brokers.core.progress_codec import Alphabet, Decoded, Encoded, decode, encode
from onward.event import Partition

Spans = Sequence[tuple[int, int]]

NOTHING = Decoded()
PARTITION = Partition("orders", 0)
ALPHABETS: list[Alphabet] = ["utf16", "bytes"]

SMALL = Progress(
    PARTITION,
    epoch=1,
    watermark=1_000,
    done_above=[(1_001, 1_003), (1_010, 1_042)],
    tries={1_000: Tries(failed=3), 1_005: Tries(1, 1, 1), 1_006: Tries(1, 1, 1)},
)
SMALL_TEXT: dict[Alphabet, str] = {
    "utf16": "O1\u573a\u652d\u7293\u6f55\ueba4\u3800\u3417\uef53\u7481\u3504\u8414\u3a0c\u6471\u5200",
    "bytes": "O1R4Cn}^qaL`h9Lj|3;*DO0t6C(pkT%hCx8",
}


def progress_of(watermark: int, done_above: Spans = (), tries: Mapping[int, Tries] | None = None) -> Progress:
    return Progress(PARTITION, 1, watermark, done_above, (), tries or {})


def cut(spans: Spans, top: int) -> list[tuple[int, int]]:
    return [(start, min(stop, top)) for start, stop in spans if start < top]


def scattered(window: int, open_share: float, seed: int) -> Progress:
    """A state in which the watermark is open and every other position is open with the same probability."""
    rng = random.Random(seed)
    base = rng.randrange(1 << 40)
    done = "0" + "".join("0" if rng.random() < open_share else "1" for _ in range(window - 1))
    return progress_of(base, [(base + match.start(), base + match.end()) for match in re.finditer("1+", done)])


# Small steps produce bitsets, mixed steps produce runs, and one huge step must not affect its neighbours.
steps = st.one_of(st.integers(1, 3), st.integers(1, 300), st.integers(1, 1 << 54))
counts = st.one_of(st.integers(0, 4), st.integers(0, (1 << 63) - 1))
watermarks = st.one_of(st.integers(0, 1_000), st.integers(0, 1 << 62))
fences = st.one_of(st.integers(0, 1_000), st.integers(0, (1 << 63) - 1))


@st.composite
def progresses(draw: st.DrawFn, max_spans: int = 80) -> Progress:
    watermark = draw(watermarks)
    spans = []
    end = watermark
    for gap, length in draw(st.lists(st.tuples(steps, steps), max_size=max_spans)):
        spans.append((end + gap, end + gap + length))
        end += gap + length
    offsets = st.one_of(st.integers(0, 100), st.integers(0, 1 << 61))
    tries = draw(st.dictionaries(offsets, st.builds(Tries, counts, counts, counts), max_size=8))
    return progress_of(watermark, spans, {watermark + offset: tried for offset, tried in tries.items()})


def test_the_format_does_not_change_silently() -> None:
    for alphabet, text in SMALL_TEXT.items():
        encoded = encode(SMALL, fence=7, clean=True, log_id="log", alphabet=alphabet)
        assert encoded == Encoded(text, covered_to=1_042, done_dropped=0, tries_dropped=0)
        expected = Decoded(7, True, list(SMALL.done_above), dict(SMALL.tries))
        assert decode(text, 1_000, log_id="log") == expected


def test_the_layout_is_the_documented_one() -> None:
    chars = SMALL_TEXT["utf16"][2:]
    points = [ord(char) for char in chars]
    bits = "".join(f"{p - 0x3400 if p <= 0xA48C else p - 0xE000 + 28_813:015b}" for p in points)
    number = {0: "000000", 1: "0000010", 2: "0000011", 3: "00001000", 7: "000011000"}
    zeros = "111111"
    fields = [
        f"{zlib.crc32(b'log:1000'):032b}",
        "1" + number[7],
        "1" + number[3] + number[0] + number[0] + number[1] + zeros + zeros,  # 1,000
        "1" + number[1] * 3 + number[1] + "000010" + "01" + "01" + "000000" + "01",  # 1,005 and 1,006
        "0",
        "10" + number[2] + "000001" + "1" + "0001" + "1" + "0" + "000011" + "1" + "0001" + "001" + "111",
    ]
    body = "".join(fields)
    assert bits[32:].startswith(body)
    assert set(bits[32 + len(body) :]) <= {"0"}
    assert len(bits) - 32 - len(body) < 15
    size = (len(bits) - 32 + 7) // 8
    assert int(bits[:32], 2) == zlib.crc32(int(bits[32:], 2).to_bytes(size, "big"))


@settings(deadline=None)  # a slow machine must not fail the test
@given(progresses(), fences, st.booleans(), st.sampled_from(ALPHABETS), st.text(max_size=8))
def test_decoding_returns_what_was_encoded(
    progress: Progress, fence: int, clean: bool, alphabet: Alphabet, log_id: str
) -> None:
    assume(log_id.isprintable())
    encoded = encode(progress, fence=fence, clean=clean, log_id=log_id, limit=1 << 20, alphabet=alphabet)
    last = progress.done_above[-1][1] if progress.done_above else progress.watermark
    assert (encoded.covered_to, encoded.done_dropped, encoded.tries_dropped) == (last, 0, 0)
    found = decode(encoded.text, progress.watermark, log_id=log_id)
    assert found == Decoded(fence, clean, list(progress.done_above), dict(progress.tries))


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("open_share", [0.01, 0.5, 0.99])
def test_large_states_are_decoded_correctly(open_share: float, alphabet: Alphabet) -> None:
    progress = scattered(5_000, open_share, seed=7)
    encoded = encode(progress, fence=1, clean=False, alphabet=alphabet)
    assert decode(encoded.text, progress.watermark).done_above == progress.done_above


def test_every_value_of_a_character_is_decoded_correctly() -> None:
    """A bitset that counts through all 15-bit values uses each of the 32,768 characters."""
    bits = "".join(f"{value:015b}" for value in range(1 << 15)) + "1"
    progress = progress_of(0, [match.span() for match in re.finditer("1+", bits)])
    text = encode(progress, fence=200, clean=False, limit=1 << 20).text  # a fence that ends its head with a character
    assert decode(text, 0).done_above == progress.done_above
    assert len(set(text[2:])) == 1 << 15
    assert_survives(text)


def test_an_interval_at_the_watermark_and_adjacent_intervals_are_merged() -> None:
    text = encode(progress_of(5, [(5, 7), (7, 9), (12, 13)]), fence=0, clean=False).text
    assert decode(text, 5).done_above == [(5, 9), (12, 13)]


def test_tries_below_the_watermark_are_left_out() -> None:
    encoded = encode(progress_of(5, [], {3: Tries(1), 5: Tries(2)}), fence=0, clean=False)
    assert decode(encoded.text, 5).tries == {5: Tries(2)}
    assert encoded.tries_dropped == 0


def test_a_thousand_positions_with_equal_tries_are_one_run() -> None:
    tries = {position: Tries(started=1) for position in range(50, 1_050)}
    encoded = encode(progress_of(50, [], tries), fence=1, clean=False)
    assert decode(encoded.text, 50).tries == tries
    assert len(encoded.text) <= 16


@pytest.mark.parametrize("spans", [[(3, 6)], [(7, 9), (8, 10)], [(8, 9), (6, 7)], [(7, 7)]])
def test_invalid_intervals_are_refused(spans: Spans) -> None:
    with pytest.raises(AssertionError):
        encode(progress_of(5, spans), fence=0, clean=False)


def test_with_another_watermark_or_log_only_the_fence_is_used() -> None:
    text = SMALL_TEXT["utf16"]
    assert decode(text, 1_001, log_id="log") == Decoded(fence=7)
    assert decode(text, 1_000, log_id="another") == Decoded(fence=7)


def flipped(text: str, at: int, bit: int) -> str:
    return text[:at] + chr(ord(text[at]) ^ 1 << bit) + text[at + 1 :]


def mutants(text: str) -> Iterator[str]:
    for at in range(len(text)):
        yield from (flipped(text, at, bit) for bit in range(16))
        yield text[:at]
        yield text[:at] + text[at + 1 :]
        yield text[:at] + text[at] + text[at:]
        yield text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :]
    yield from (text + tail for tail in (*text, "\0", " ", "\n", "~", "\u3400", "\u3400\u3400", "00000"))


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_a_text_with_a_flip_cut_swap_or_tail_never_decodes_to_another_progress(alphabet: Alphabet) -> None:
    text = SMALL_TEXT[alphabet]
    allowed = [NOTHING, decode(text, 1_000, log_id="log")]
    assert all(decode(mutant, 1_000, log_id="log") in allowed for mutant in mutants(text))


@settings(deadline=None)
@given(progresses(max_spans=20), st.sampled_from(ALPHABETS), st.data())
def test_a_mutated_text_never_decodes_to_another_progress(
    progress: Progress, alphabet: Alphabet, data: st.DataObject
) -> None:
    text = encode(progress, fence=3, clean=True, alphabet=alphabet).text
    ends = st.integers(0, len(text))
    (a, b), (c, d) = (sorted(data.draw(st.tuples(ends, ends))) for _ in range(2))
    filling = data.draw(st.one_of(st.just(text[c:d]), st.text(max_size=4), st.text(text, max_size=4)))
    found = decode(text[:a] + filling + text[b:], progress.watermark)
    assert found in (NOTHING, Decoded(3, True, list(progress.done_above), dict(progress.tries)))


@settings(deadline=None)
@given(st.one_of(st.text(), st.text().map("O1".__add__), st.text("\u3400\u4e00\ua48c\ue000\uef72").map("O1".__add__)))
@example("")
@example("O1")
@example("O1\ud800")
@example('{"fence": 7}')
@example("R2-199")
def test_a_text_of_another_program_decodes_to_nothing(text: str) -> None:
    assert decode(text, 0) == NOTHING


def sealed(bits: str) -> str:
    """A text with a correct checksum and any content, as only a newer or a hostile writer would produce it."""
    bits += "0" * (-(32 + len(bits)) % 15)
    check = zlib.crc32(int(bits, 2).to_bytes((len(bits) + 7) // 8, "big"))
    whole = f"{check:032b}{bits}"
    values = [int(whole[at : at + 15], 2) for at in range(0, len(whole), 15)]
    return "O1" + "".join(chr(0x3400 + v if v < 28_813 else 0xE000 + v - 28_813) for v in values)


HEAD = f"{zlib.crc32(b':0'):032b}" + "0" + "000000"


def test_a_text_of_a_future_version_decodes_to_nothing() -> None:
    text = sealed(HEAD + "00")
    assert decode(text, 0) == Decoded(fence=0)
    assert decode("O2" + text[2:], 0) == NOTHING


@settings(deadline=None)
@given(st.text("01", max_size=400))
@example("0" + "10" + "111111" + "1" * 63 + "111111" * 20)  # 2**63 intervals of one position
@example("0" + "11" + "111111" + "1" * 63)  # a bitset longer than the text
@example("1" + "000000" * 3 + "0000010" + "111111" + "111110" + "01" + "1" * 62 + "00")  # 2**63 positions tried
@example("0" * 40)  # more than padding
def test_nonsense_with_a_correct_checksum_neither_raises_nor_fills_the_memory(bits: str) -> None:
    found = decode(sealed(HEAD + bits), 0)
    assert len(found.done_above) < 10_000
    assert len(found.tries) <= 100_000


@settings(deadline=None)
@given(progresses(), st.sampled_from([16, 32, 64, 4_096]), st.sampled_from(ALPHABETS))
def test_over_the_limit_it_drops_from_the_top(progress: Progress, limit: int, alphabet: Alphabet) -> None:
    encoded = encode(progress, fence=1, clean=True, limit=limit, alphabet=alphabet)
    assert len(encoded.text.encode("utf-16-le")) // 2 <= limit
    found = decode(encoded.text, progress.watermark)
    assert (found.fence, found.clean) == (1, True)
    assert found.done_above == cut(progress.done_above, encoded.covered_to)
    size = sum(stop - start for start, stop in progress.done_above)
    assert encoded.done_dropped == size - sum(stop - start for start, stop in found.done_above)
    kept = sorted(progress.tries)[: len(progress.tries) - encoded.tries_dropped]
    assert found.tries == {position: progress.tries[position] for position in kept}


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("open_share", [0.01, 0.2, 0.5])
def test_the_limit_is_used_up(open_share: float, alphabet: Alphabet) -> None:
    progress = scattered(100_000, open_share, seed=3)
    for limit in (64, 512):
        encoded = encode(progress, fence=1, clean=False, limit=limit, alphabet=alphabet)
        assert limit - 2 <= len(encoded.text) <= limit
        assert encoded.done_dropped > 0
        found = decode(encoded.text, progress.watermark)
        assert found.done_above == cut(progress.done_above, encoded.covered_to)


def test_tries_have_priority_over_done_positions() -> None:
    tries = {position: Tries(failed=1 + position % 7) for position in range(0, 4_000, 13)}
    progress = progress_of(0, [(position, position + 1) for position in range(1, 4_000, 2)], tries)
    encoded = encode(progress, fence=1, clean=False, limit=100)
    found = decode(encoded.text, 0)
    assert 0 < encoded.tries_dropped < len(tries)
    assert found.tries == {position: tries[position] for position in sorted(tries)[: -encoded.tries_dropped]}
    assert encode(progress, fence=1, clean=False, limit=400).tries_dropped == 0


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_a_limit_too_small_for_the_fence_gives_no_text(alphabet: Alphabet) -> None:
    for limit in range(8):
        encoded = encode(SMALL, fence=(1 << 63) - 1, clean=True, limit=limit, alphabet=alphabet)
        assert encoded == Encoded("", covered_to=1_000, done_dropped=34, tries_dropped=3)
    assert decode("", 1_000) == NOTHING


@pytest.mark.parametrize(
    ("window", "open_share", "most"), [(20_000, 0.01, 145), (100_000, 0.01, 640), (60_000, 0.5, 4_015)]
)
def test_sizes(window: int, open_share: float, most: int) -> None:
    for seed in range(3):
        encoded = encode(scattered(window, open_share, seed), fence=1_000, clean=False)
        assert encoded.done_dropped == 0
        assert len(encoded.text) <= most


def test_the_text_of_no_progress_is_tiny() -> None:
    assert len(encode(progress_of(1 << 40), fence=1_000, clean=True).text) == 8
    assert len(encode(progress_of(1 << 62), fence=(1 << 63) - 1, clean=True).text) <= 12
    assert len(encode(progress_of(1 << 40), fence=1_000, clean=True, alphabet="bytes").text) == 16


def assert_survives(text: str) -> None:
    assert text.encode("utf-8").decode("utf-8") == text
    assert len(text.encode("utf-16-le")) == 2 * len(text)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert unicodedata.normalize(form, text) == text


@settings(deadline=None)
@given(progresses(), st.sampled_from(ALPHABETS))
def test_text_survives_encodings_and_normalisation(progress: Progress, alphabet: Alphabet) -> None:
    text = encode(progress, fence=9, clean=False, alphabet=alphabet).text
    assert_survives(text)
    assert "\0" not in text
    if alphabet == "bytes":
        assert len(text.encode("utf-8")) == len(text)
