"""Our kernels but attention's without a GPU: in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import msgspec
import pytest
from support.interpreter import interpret
from support.triton_compiles import PACKAGE, all_launches, most_stack

from pdserve.model_runner.device.triton_compiler import SHARED_BYTES, Compiled, CompileRequest, compile_kernels

DEVICE_TESTS = sorted((Path(__file__).parents[2] / "device").glob("test_*.py"))
# test_triton_attention.py runs all those of attention.
OF_OPS = [path for path in DEVICE_TESTS if "attention" not in path.name]
WHOLE = ("attention_models", "device_sampler", "model", "packed_model")
"""Files that run whole models and loops, of kernels that the others run one by one."""
OF_SINGLE_KERNELS = [path for path in DEVICE_TESTS if path.stem.removeprefix("test_device_") not in WHOLE]
ROOM = Path(__file__).parents[3] / "model_runner"
OPS = ("activations", "fp8_gemm", "grouped_gemm", "int4_gemm", "norms", "quantise", "rope", "table")
FILES = (
    *(f"kv/triton/{name}" for name in ("checksum", "pages")),
    *(f"ops/triton/{name}" for name in OPS),
    *(f"sampling/triton/{name}" for name in ("draw_choice", "draw_levels", "row_table", "token_logprobs")),
)


@pytest.mark.timeout(240)
def test_a_sample_agrees_with_the_reference_in_the_interpreter() -> None:
    """Attention's kernels too: another process would import all of this once more."""
    print(interpret(OF_SINGLE_KERNELS))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sample_of_whole_models_agrees_in_the_interpreter() -> None:
    print(interpret([path for path in DEVICE_TESTS if path not in OF_SINGLE_KERNELS]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quarter", range(4))
def test_all_agree_with_the_reference_in_the_interpreter(quarter: int) -> None:
    interpret(OF_OPS, quarter=quarter)


def check_resources(requests: list[CompileRequest]) -> None:
    check_compiled(requests, compile_kernels(requests))


def check_compiled(requests: list[CompileRequest], results: list[Compiled]) -> None:
    for request, compiled in zip(requests, results, strict=True):
        described = f"{request.kernel} {request.constants} for {request.capability}: {compiled.registers} registers"
        assert compiled.stack_bytes <= most_stack(), f"{described}, and {compiled.stack_bytes} bytes of a thread spill"
        assert compiled.shared_bytes <= SHARED_BYTES[request.capability], (
            f"{described}, {compiled.shared_bytes} bytes shared"
        )
        assert compiled.registers * 32 * request.num_warps <= 65536, f"{described} do not fit"


def for_capability(requests: list[CompileRequest], capability: int) -> list[CompileRequest]:
    """Return the requests for ``capability``. Before 8.9 nothing multiplies FP8."""
    found = [request for request in requests if capability >= 89 or not request.constants.get("EIGHT")]
    return [msgspec.structs.replace(request, capability=capability) for request in found]


def sample() -> list[CompileRequest]:
    """Return a request for one kernel of each file, for one of two GPU generations."""
    first = {request.kernel.split(":")[0]: request for request in reversed(list(all_launches()))}
    assert {name.removeprefix(PACKAGE).replace(".", "/") for name in first} == set(FILES)
    found = list(first.values())
    return [*for_capability(found[::2], 80), *for_capability(found[1::2], 90)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_all_compile_without_spills(capability: int) -> None:
    check_resources(for_capability(list(all_launches()), capability))


@pytest.mark.slow
def test_copies_of_pages_are_wide_and_products_meet_the_tensor_cores() -> None:
    """What the compiler must see for itself, as it is for nothing that a result would tell."""
    copy = next(r for r in all_launches() if r.kernel.endswith("_move_pages") and r.constants["units_ptr"] is None)
    down = next(
        r
        for r in all_launches()
        if r.kernel.endswith("_experts_down") and r.constants["M"] == 64 and r.types["x_ptr"] == "*bf16"
    )
    wide, on_80, on_90 = compile_kernels([copy, *for_capability([down], 80), *for_capability([down], 90)])
    assert wide.count("ld.global.v2.b64")
    assert wide.count("st.global.v2.b64")
    four, eight = (
        next(
            r
            for r in all_launches()
            if r.kernel.endswith(name) and r.constants["M"] == 128 and r.constants.get("EIGHT") == eight
        )
        for name, eight in (("_int4_product", None), ("_fp8_product", True))
    )
    four_on_80, eight_on_90 = compile_kernels([*for_capability([four], 80), *for_capability([eight], 90)])
    assert four_on_80.count("mma.sync")
    assert four_on_80.count("cp.async.cg.shared.global")
    # Multiplied as FP8, and added up beyond 128 by other instructions.
    assert "e4m3.e4m3" in eight_on_90.ptx
    assert eight_on_90.count("wgmma.mma_async") == 4
    assert on_80.count("mma.sync")
    assert on_80.count("cp.async.cg.shared.global")
    assert on_90.count("wgmma.mma_async")


COUNTS = {"size", "tokens", "num", "num_pairs", "num_writes", "num_last", "scales_block"}
"""Arguments that differ from step to step."""


def test_no_kernel_is_compiled_anew_for_a_step_of_one_token_or_of_sixteen() -> None:
    """As Triton does for integers, unless it is told not to; a request would wait a second for each."""
    found = set()
    for request in all_launches():
        module, _, name = request.kernel.partition(":")
        for parameter in getattr(importlib.import_module(module), name).params:
            if parameter.name in COUNTS and not parameter.is_constexpr:
                assert parameter.do_not_specialize, f"{request.kernel}: {parameter.name}"
                found.add(parameter.name)
    assert found == COUNTS


def test_every_kernel_that_is_launched_is_in_the_list() -> None:
    listed = {request.kernel.removeprefix(PACKAGE).replace(".", "/") for request in all_launches()}
    texts = {file: (ROOM / f"{file}.py").read_text() for file in FILES}
    launches = "".join(texts.values()) + (ROOM / "sampling/triton/sampling.py").read_text()
    kernels = {
        f"{file}:{kernel}"
        for file, text in texts.items()
        for kernel in re.findall(r"@triton\.jit(?:\(.*\))?\ndef (\w+)\(", text)
        if re.search(rf"\b{kernel}\[", launches)
    }
    assert kernels == listed
