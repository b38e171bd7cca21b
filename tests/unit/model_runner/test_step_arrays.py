"""Where a device has the arrays of a step."""

from __future__ import annotations

from support.recording_device import RecordingDevice

from pdserve.model_runner.batch.step_arrays import StepArrays
from pdserve.model_runner.batch.step_plan import plan_step
from tests.unit.model_runner.test_step_runner import make_step


def test_small_steps_find_their_arrays_where_they_were() -> None:
    steps = (
        make_step((0, 0, [7], True)),
        make_step((1, 0, list(range(30)), True)),
        make_step((0, 1, [8], True), (1, 30, [9], True)),
    )
    with RecordingDevice() as device:
        arrays, seen = StepArrays(device, 4), []
        for step in steps:
            there = arrays.load(plan_step(step, 16))
            seen.append((there.input_ids.data_ptr(), there.input_ids.tolist()))
    first, long, last = seen
    assert [ids for _, ids in seen] == [[7], list(range(30)), [8, 9]]
    assert first[0] == last[0] != long[0]
