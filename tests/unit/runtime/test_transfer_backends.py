"""The registry of transfer backends: what it declares is what the classes have."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from pdserve.runtime.transfer_backends import BACKENDS, BackendSpec, TransferBackendName
from pdserve.server.cluster_options import ClusterOptions
from pdserve.server.options import ServerOptions

FOLDER = Path(__file__).parents[3] / "disaggregation" / "transfer" / "backends"


@pytest.mark.parametrize("spec", BACKENDS.values(), ids=BACKENDS)
def test_every_path_names_a_class(spec: BackendSpec) -> None:
    module, class_name = spec.path.split(".")
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    assert class_name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def test_the_choices_of_options_are_the_registered_names() -> None:
    assert get_args(TransferBackendName) == tuple(BACKENDS)
    assert {o.disaggregation_transfer_backend for o in (ServerOptions(), ClusterOptions())} <= set(BACKENDS)
