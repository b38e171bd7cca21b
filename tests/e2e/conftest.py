"""Shared by the end-to-end tests."""

from __future__ import annotations

import pytest
from support import tiny_model


@pytest.fixture(scope="session")
def tiny_args(tmp_path_factory) -> list[str]:
    """Flags that serve a tiny random model."""
    return tiny_model.tiny_args(tmp_path_factory.mktemp("tiny"))
