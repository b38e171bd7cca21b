"""Layers with a window give back what lies before it, and no token needs it; the simulated worker checks
(``sim.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from support.sim import SimInstance, SimWindow, make_options, reference_output

from pdserve.mem_cache import window_pages
from pdserve.mem_cache.errors import InvariantViolation, WindowPagesShort
from pdserve.mem_cache.window_pages import WindowPages, WindowSpan
from pdserve.messages.base import I32
from pdserve.messages.channel import encode
from pdserve.messages.worker import ForwardStep

Patch = pytest.MonkeyPatch


def i32(*values):
    return np.array(values, dtype=np.int32)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


def make_sim(window: SimWindow, **changes) -> SimInstance:
    return SimInstance(make_options(**({"max_total_tokens": 1024} | changes)), window=window)


def run(sim: SimInstance, rid: str, tokens: list[int], max_new_tokens: int = 8, **kwargs) -> int:
    """Run a request to its end, and return how many tokens were found cached."""
    sim.submit(rid, tokens, max_new_tokens=max_new_tokens, **kwargs)
    sim.run_until_idle()
    assert sim.tokens[rid] == reference_output(tokens, max_new_tokens)
    return sim.ends[rid].meta.cached_tokens


def test_a_prompt_many_windows_long_needs_a_window_and_a_piece_of_it():
    sim = make_sim(SimWindow(10, 32))
    assert run(sim, "a", prompt(400), max_new_tokens=60) == 0
    usage = sim.scheduler.memory.pool.usage()
    assert usage["window_in_use"] == 0
    assert usage["window_total"] == 32


def test_pieces_are_no_longer_than_window_pages_suffice_for():
    sim = make_sim(SimWindow(10, 16), chunked_prefill_size=64)
    sim.submit("a", prompt(100), max_new_tokens=4)
    pieces = []
    while sim.scheduler.reqs:
        sim.plan()
        for step in sim.to_worker.messages:
            pieces.append(len(step.input_ids) // 4)
        while sim.work():
            pass
    # A window of 9 tokens before a page's first takes 3 pages, of 4.
    assert pieces[0] == 16
    assert max(pieces[1:]) == 4
    assert sim.tokens["a"] == reference_output(prompt(100), 4)


def test_requests_wait_for_window_pages_that_are_promised_to_others():
    sim = make_sim(SimWindow(10, 48))
    for i in range(6):
        sim.submit(f"r{i}", prompt(30, i), max_new_tokens=20)
    most = 0
    while sim.scheduler.reqs:
        sim.plan()
        sim.scheduler.check_invariants()
        most = max(most, len(sim.scheduler.planner.running))
        sim.work()
    # Of 12 pages each is promised 4, and some are left for pieces of prompts.
    assert most == 2
    assert all(sim.tokens[f"r{i}"] == reference_output(prompt(30, i), 20) for i in range(6))


def test_a_prefix_is_found_as_far_as_the_window_before_it_is_there():
    sim = make_sim(SimWindow(10, 64))
    assert run(sim, "a", prompt(40)) == 0
    assert run(sim, "b", prompt(40)) == 36
    # Others take the window pages, but not the full ones.
    for i in range(3):
        run(sim, f"other{i}", prompt(60, seed=10 + i))
    cached = sim.scheduler.memory.pool.usage()["cached"]
    assert run(sim, "c", prompt(40)) == 0
    assert sim.scheduler.memory.pool.usage()["cached"] == cached
    # The request that computed it again left its window pages to what was cached.
    assert run(sim, "d", prompt(40)) == 36


def test_a_shared_prefix_is_used_by_those_that_stand_in_it_alone():
    sim = make_sim(SimWindow(10, 64))
    shared = prompt(24)
    for i in range(4):
        sim.submit(f"r{i}", shared + prompt(10 + 30 * i, i + 1), max_new_tokens=30)
        for _ in range(3):
            sim.plan()
            sim.work()
            sim.scheduler.check_invariants()
    sim.run_until_idle()
    for i in range(4):
        assert sim.tokens[f"r{i}"] == reference_output(shared + prompt(10 + 30 * i, i + 1), 30)


def test_several_answers_begin_in_the_window_of_the_first():
    sim = make_sim(SimWindow(10, 96))
    for i in range(3):
        sim.submit(f"r{i}", prompt(50), max_new_tokens=12, fork_of="r0" if i else "")
    sim.run_until_idle()
    assert [sim.ends[f"r{i}"].meta.cached_tokens for i in range(3)] == [0, 48, 48]
    assert all(sim.tokens[f"r{i}"] == reference_output(prompt(50), 12) for i in range(3))


def test_what_has_left_a_window_is_let_go_of_by_the_steps_before():
    """A page that a peer is to write waits for these steps: they may still read it."""
    sim = make_sim(SimWindow(10, 64))
    sim.submit("a", prompt(60))
    sim.plan()
    memory = sim.scheduler.memory
    assert (memory.pool.newest_step, memory.pool.let_go_step, sim.scheduler.completed_step) == (2, 1, 0)


def test_a_window_that_is_kept_grows_within_what_it_was_promised() -> None:
    pages, moving, other = make_pages(window=6, num_pages=6), WindowSpan(), WindowSpan()
    pages.promise(moving, 100)
    pages.promise(other, 100)
    pages._extend(moving, i32(1, 2, 3))
    pages._leave(moving, i32(1))
    assert pages.keep(moving, row(1, 2, 3), 1)
    assert pages.growable([moving], [12]) == [True]


def test_a_window_that_is_kept_stays_where_the_request_moves_on():
    pages, moving, other = make_pages(window=6, num_pages=6), WindowSpan(), WindowSpan()
    pages.promise(moving, 100)
    pages.promise(other, 100)
    pages._extend(moving, i32(1, 2, 3))
    assert pages.keep(moving, row(1, 2, 3), 0)
    assert pages.growable([moving, other], [12, 0]) == [False, True]  # all others' to count on
    pages.end(other, row())
    assert pages.growable([moving, moving], [12, 12]) == [True, True]
    pages._extend(moving, i32(4, 5, 6))
    assert pages.growable([moving], [24]) == [False]
    pages.let_go(moving)
    pages._leave(moving, i32(1, 2, 3, 4))
    assert pages.growable([moving], [24]) == [True]
    # What has left can be had again as long as no other request has taken it.
    assert pages.keep(moving, row(1, 2, 3, 4, 5, 6), 3)
    pages.let_go(moving)
    pages._leave(moving, i32(4))
    pages._extend(other, i32(7, 8, 9))
    assert not pages.keep(moving, row(1, 2, 3, 4, 5, 6), 2)


def test_retraction_and_flush_give_all_window_pages_back():
    options = {"max_total_tokens": 64, "schedule_conservativeness": 0.01}
    sim = make_sim(SimWindow(6, 48), **options)
    for i in range(4):
        sim.submit(f"r{i}", prompt(8, i), max_new_tokens=30)
    sim.run_until_idle()
    assert sim.scheduler.planner.retraction.count > 0
    assert all(sim.tokens[f"r{i}"] == reference_output(prompt(8, i), 30) for i in range(4))
    sim.scheduler.memory.flush()
    assert sim.scheduler.memory.pool.usage()["window_free"] == 48


def test_steps_of_a_model_without_windows_say_nothing_of_them():
    sim = SimInstance()
    sim.submit("a", prompt(10))
    sim.plan()
    (step,) = [m for m in sim.to_worker.messages if isinstance(m, ForwardStep)][:1]
    assert b"window" not in encode([step])


# --- the pages themselves ---


def make_pages(window: int = 6, num_pages: int = 8) -> WindowPages:
    return WindowPages(window, num_pages * 4, 20, 4)


def row(*pages: int) -> I32:
    """Return the slots of a request with these pages, which are full."""
    return i32(*(4 * page + i for page in pages for i in range(4)))


def test_what_is_usable_ends_behind_a_whole_window():
    pages, span = make_pages(window=6), WindowSpan()
    pages.promise(span, 100)
    pages._extend(span, i32(3, 5, 7, 8))
    prefixes = ([], [3], [3, 5, 7, 8], [3, 5, 7, 9], [3, 9, 7, 8], [9, 5, 7], [9, 5])
    assert [pages.usable([row(*prefix)]) // 4 for prefix in prefixes] == [0, 1, 4, 3, 4, 3, 0]


def test_the_longest_idle_goes_first_and_no_used_one_ever():
    pages, first, second = make_pages(window=6, num_pages=5), WindowSpan(), WindowSpan()
    pages._extend(first, i32(1, 2, 3, 4))
    pages._leave(first, i32(1, 2))
    pages.begin(second, row(1, 2, 3), 12)
    pages._extend(first, i32(5))
    with pytest.raises(WindowPagesShort):
        pages._extend(first, i32(6))
    pages._leave(first, i32(3, 4))
    pages._extend(first, i32(6, 7))
    assert pages.page_of[1:8].astype(bool).tolist() == [False, True, True, False, True, True, True]
    assert sorted(pages.take_changes()[:, 0].tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert pages.take_changes().size == 0


# --- mistakes ---


def a_page_too_early(patch: Patch) -> None:
    """Let a request give back a page of which the next token still sees something."""
    original = WindowPages._first_page
    patch.setattr(WindowPages, "_first_page", lambda self, position: original(self, position + self.page_size))
    # What it lets go of is overwritten at once, as when pages are short.
    leave = WindowPages._leave

    def leave_and_lose(self, span, pages):
        leave(self, span, pages)
        for page in pages[self._uses[pages] == 0].tolist():
            self._detach(page)

    patch.setattr(WindowPages, "_leave", leave_and_lose)


def a_match_whose_window_is_gone(patch: Patch) -> None:
    """Take whatever full pages are cached for a match."""
    patch.setattr(window_pages, "_usable", lambda missing, reach: len(missing))


def a_shared_page_goes_with_its_first_user(patch: Patch) -> None:
    """Let a request that moves on give back what another one sees."""
    original = WindowPages._leave

    def leave(self, span, pages):
        original(self, span, pages)
        for page in pages.tolist():
            self._detach(page)

    patch.setattr(WindowPages, "_leave", leave)


def the_worker_gets_a_step_late(patch: Patch) -> None:
    """Changes of the map go with the step behind the one that needs them."""
    original, kept = WindowPages.take_changes, [np.empty((0, 2), dtype=np.int32)]

    def take_changes(self):
        kept.append(original(self))
        return kept.pop(0)

    patch.setattr(WindowPages, "take_changes", take_changes)


@pytest.mark.parametrize(
    "mistake",
    [
        a_page_too_early,
        a_match_whose_window_is_gone,
        a_shared_page_goes_with_its_first_user,
        the_worker_gets_a_step_late,
    ],
)
def test_mistakes_are_found(mistake: Callable[[Patch], None], monkeypatch: Patch):
    scenes = (
        test_a_prompt_many_windows_long_needs_a_window_and_a_piece_of_it,
        test_a_prefix_is_found_as_far_as_the_window_before_it_is_there,
        test_a_shared_prefix_is_used_by_those_that_stand_in_it_alone,
    )
    mistake(monkeypatch)
    found = 0
    for scene in scenes:
        try:
            scene()
        except (AssertionError, InvariantViolation, WindowPagesShort):
            found += 1
    assert found
