"""What is said when a process imports torch after all."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch

from pdserve.model_runner.torch_import import note_torch, use_one_torch_thread


def test_only_the_feature_that_imports_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    note_torch("profiles")
    assert not caplog.messages
    monkeypatch.delitem(sys.modules, "torch")
    note_torch("profiles")
    assert caplog.messages == ["torch is imported for profiles"]


@pytest.mark.usefixtures("one_thread")
def test_torch_gets_one_thread_whether_it_is_there_or_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    use_one_torch_thread()
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
