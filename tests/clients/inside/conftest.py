"""Fixtures of tests that a client's own environment runs. They see the server's URL, and nothing of pdserve."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in ("--url", "--admin-url", "--model", "--model-folder", "--limit-factor"):
        parser.addoption(name, default="")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--url"))


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--model"))


@pytest.fixture
def model_folder(request: pytest.FixtureRequest) -> str:
    """A Hugging Face folder with the same weights and the same tokenizer."""
    return str(request.config.getoption("--model-folder"))
