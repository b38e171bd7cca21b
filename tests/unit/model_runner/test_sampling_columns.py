"""A sampling parameter is declared once, in ``SamplingParams``; what reads it elsewhere has the same fields."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pdserve.messages.sampling import COLUMNS, SamplingParams
from pdserve.messages.worker import RowInit
from pdserve.model_runner.sampling.row_params import ROW_PARAMS
from pdserve.model_runner.sampling.rows import host_rows
from pdserve.server.http.bodies.request_fields import SamplingFields

ROOT = Path(__file__).parents[3]
CPP_TYPES = {
    "uint64_t": np.uint64,
    "int64_t": np.int64,
    "int32_t": np.int32,
    "float": np.float32,
    "double": np.float64,
    "bool": np.bool_,
}


def test_the_kernels_struct_has_the_columns_of_the_row_table():
    header = (ROOT / "model_runner/cpu_engine/src/sampling.h").read_text()
    [body] = re.findall(r"struct RowParams \{\n(.*?)\n\};", header, re.DOTALL)
    fields = [re.fullmatch(r"  (\w+) (\w+);( *//.*)?", line) for line in body.splitlines()]
    assert all(fields), body
    assert np.dtype([(m[2], CPP_TYPES[m[1]]) for m in fields], align=True) == ROW_PARAMS


def test_columns_are_in_the_order_of_the_request_s_fields_and_hold_what_it_says():
    names = [name for name in SamplingParams.__struct_fields__ if name in COLUMNS]
    assert list(ROW_PARAMS.names)[: len(names)] == names == list(COLUMNS)
    # Different values, none of which the table has in another form. Sums of powers of two are exact in float32.
    values = {
        name: (i + 2) if column.dtype[-5:] == "int64" else 2.0**-i for i, (name, column) in enumerate(COLUMNS.items())
    }
    states = host_rows(1, 100)
    states.start(RowInit(0, 3, SamplingParams(**values), logprobs=5, history=b""))
    [row] = states.params(np.array([0]))
    assert {name: row[name] for name in names} == values
    assert (row["prompt_len"], row["logprobs"], row["greedy"], row["penalised"]) == (3, 5, False, True)


def test_a_body_has_every_parameter_but_those_that_the_two_apis_name_differently():
    missing = set(SamplingParams.__struct_fields__) - set(SamplingFields.model_fields)
    # The server chooses the marks by the model. A grammar comes of one of several fields.
    assert missing == {"seed", "max_new_tokens", "min_new_tokens", "marks", "grammar"}
