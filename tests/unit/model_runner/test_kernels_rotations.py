"""Tables of rotations: the nearest float32, and within their last bit what the torch model turns by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import FAMILIES, make_reference

from pdserve.model_files.context_length import with_context
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.rope_frequencies import inverse_frequencies
from pdserve.model_files.spec import RopeSpec
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.rotations import rotations
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.ops.layers.rotary import RotaryEmbedding

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("theta", "dim", "positions"), [(1e5, 64, 8192), (500.0, 6, 7), (1e6, 16, 1 << 18), (1e4, 2, 1)]
)
def test_cosines_and_sines_are_the_nearest(theta: float, dim: int, positions: int, threads: int) -> None:
    rope = RopeSpec(rotary_dim=dim, theta=theta)
    found = rotations(rope, dim, positions, Team(threads, spin_us=1))
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope)
    np.testing.assert_array_equal(found.cosines, np.cos(angles.astype(np.float64)).astype(np.float32))
    np.testing.assert_array_equal(found.sines, np.sin(angles.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_turns_as_in_the_torch_model(name: str) -> None:
    spec = spec_from_hf(make_reference(name).config.to_dict())
    spec = with_context(spec, spec.context_length)
    for rope in spec.ropes:
        found = rotations(rope, spec.rotated_dim, spec.context_length, Team(1))
        embedding = RotaryEmbedding(rope, spec.rotated_dim, dtype=torch.float32, device=torch.device("cpu"))
        turn = embedding.forward(torch.arange(spec.context_length))
        half = spec.rotated_dim // 2
        for values, expected in zip(found, turn, strict=True):
            torch.testing.assert_close(torch.from_numpy(values), expected[:, 0, half:], atol=1.5e-7, rtol=2e-7)
