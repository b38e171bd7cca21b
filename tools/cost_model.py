"""``python -P -m tools.cost_model``: what the cost model takes of the scheduler's loop, CPU time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pdserve.scheduler.estimates.cost_model import CostModel, StepShape

STEPS, ROUNDS = 2000, 7
MICRO = 1e6


def make_shapes(rng: random.Random) -> list[StepShape]:
    """Make ``STEPS`` step shapes with decodes of 1 to 32 requests; every other one also has a piece of a prompt."""
    shapes = []
    for i in range(STEPS):
        decodes = rng.randrange(1, 33)
        shape = StepShape(decodes, decodes * rng.randrange(20, 2000))
        shapes.append(shape.with_piece(rng.randrange(2000), rng.randrange(1, 129)) if i % 2 else shape)
    return shapes


def microseconds(action: Callable[[StepShape], object], shapes: list[StepShape]) -> float:
    """Return the CPU time of one call of ``action``, in µs: the mean over ``shapes`` in the fastest of several rounds.

    The fastest round is taken, so that other processes' use of caches is left out.
    """
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for shape in shapes:
            action(shape)
        best = min(best, time.thread_time() - begin)
    return best / len(shapes) * MICRO


def main() -> None:
    """Measure the CPU time of learning, estimating and choosing a prompt piece's size, and print it in µs."""
    rng = random.Random(0)
    shapes, model = make_shapes(rng), CostModel()

    def learn(shape: StepShape) -> None:
        ms = max(10.0, 0.5 * shape.tokens) + 1e-3 * shape.kv_tokens
        model.learn(shape, ms * rng.lognormvariate(0, 0.05), ms)
        model.catch_up()

    print(f"learn, fits included: {microseconds(learn, shapes):.1f} µs a step")
    print(f"estimate:             {microseconds(model.estimate, shapes):.1f} µs")
    within = microseconds(lambda s: model.tokens_within(40.0, s.decodes_alone, 100, 512), shapes)
    print(f"tokens_within:        {within:.1f} µs a prompt piece")


if __name__ == "__main__":
    main()
