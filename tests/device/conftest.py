"""Triton's kernels (``model_runner/*/triton/``): on a GPU where there is one, else in Triton's interpreter.

A process has that for all kernels or for none (``TRITON_INTERPRET=1`` from its start).
``tests/unit/model_runner/test_triton_ops.py`` starts one that has.
"""

from __future__ import annotations

import zlib

import pytest
from support.triton_device import CAN_RUN, INTERPRETED

if not CAN_RUN:
    collect_ignore_glob = ["*"]
if INTERPRETED:
    from support.quick_interpreter import remember_builtins

    remember_builtins()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--one-of-each`` and ``--cases-quarter``, with which tests run the slow interpreter."""
    parser.addoption("--one-of-each", metavar="SEED", help="run one case of each test, drawn by this seed")
    parser.addoption("--cases-quarter", type=int, choices=range(4), help="run every fourth case, from this one on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the cases of ``--one-of-each`` or of ``--cases-quarter``."""
    quarter = config.getoption("--cases-quarter")
    if quarter is not None:
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % 4 != quarter])
        items[:] = items[quarter::4]
        return
    seed = config.getoption("--one-of-each")
    if seed is None:
        return
    drawn = sorted(items, key=lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode()), reverse=True)
    chosen = {item.nodeid.partition("[")[0]: item for item in drawn}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen.values()])
    items[:] = [item for item in items if item in chosen.values()]
