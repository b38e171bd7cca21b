"""Stop strings against a reference that looks at the whole text at once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdserve.detokenizer.stop_strings import StopMatcher

# Few characters: matches, near misses and overlaps are common.
text_of_ab = st.text(alphabet="abé", max_size=30)
stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=6), min_size=1, max_size=4)


def run(stop, pieces):
    """Feed all pieces; returns (text, matched, index of the piece that completed the match)."""
    matcher = StopMatcher(stop)
    shown = ""
    for i, piece in enumerate(pieces):
        released = matcher.feed(piece)
        shown += released.text
        if released.matched is not None:
            return shown, released.matched, i
    return shown + matcher.flush(), None, None


def naive(text, stop):
    """Return the text before the stop string that ends first, and of these the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, None


def cut(text, places):
    borders = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(borders)]


@given(text_of_ab, stops, st.lists(st.integers(0, 40), max_size=8))
def test_any_cutting_gives_what_a_search_of_the_whole_text_gives(text, stop, places):
    pieces = cut(text, places)
    shown, matched, index = run(stop, pieces)
    want_text, want_matched, end = naive(text, stop)
    assert (shown, matched) == (want_text, want_matched)
    if matched is not None:
        before = sum(len(p) for p in pieces[:index])
        assert before < end <= before + len(pieces[index])


@given(text_of_ab, text_of_ab, stops)
def test_a_match_that_ends_where_none_may_is_passed_over(first, rest, stop):
    """What begins there and ends later counts."""
    matcher = StopMatcher(stop)
    shown = "".join(matcher.feed(character, may_match=False).text for character in first)
    want, matched = first + rest, None
    for end in range(len(first) + 1, len(want) + 1):
        ends = [s for s in stop if want[:end].endswith(s)]
        if ends:
            matched = max(ends, key=len)
            want = want[: end - len(matched)]
            break
    for character in rest:
        released = matcher.feed(character)
        shown += released.text
        if released.matched is not None:
            assert (shown, released.matched) == (want, matched)
            return
    assert (shown + matcher.flush(), None) == (want, matched)


@given(text_of_ab, stops)
def test_text_shown_early_never_contains_a_beginning_that_could_still_match(text, stop):
    matcher = StopMatcher(stop)
    shown = ""
    for i, character in enumerate(text):
        released = matcher.feed(character)
        shown += released.text
        if released.matched is not None:
            return
        seen = text[: i + 1]
        longest_beginning = max(k for s in stop for k in range(len(s)) if seen.endswith(s[:k]))
        assert shown == seen[: len(seen) - longest_beginning]


def test_overlapping_stops_end_at_the_first_that_is_complete():
    assert run(["abcd", "bc"], ["xabc", "d"])[:2] == ("xa", "bc")
    assert run(["abc", "bc", "c"], ["xab", "c"])[:2] == ("x", "abc")


def test_a_failed_beginning_is_released_and_the_rest_is_searched_again():
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == ("a", "aab", 3)


def test_a_long_repetitive_stop_string_costs_no_more_than_a_short_one():
    matcher = StopMatcher(["a" * 4096])
    for _ in range(4):
        matcher.feed("a" * 1000 + "b")
    assert matcher.feed("a" * 4096).matched == "a" * 4096
