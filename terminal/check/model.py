"""Whether a model can be served here: found, of a known family, complete, with a tokenizer, and not too big.

Of a model that transformers' own class would compute, only its start can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...model_files.checkpoint import TensorSize, tensor_sizes
from ...model_files.context_length import without_idle_windows
from ...model_files.errors import InvalidWeights, ModelError, ModelNotFound, NotDownloaded, UnsupportedModel
from ...model_files.foreign_config import ForeignModel, read_foreign
from ...model_files.model_impl import ModelImpl, choose_model_impl
from ...model_files.model_path import ModelSource, resolve_model
from ...model_files.packed_names import refuse_stray_scales
from ...model_files.spec import ModelSpec
from ...model_files.spec_reader import read_spec
from ...model_files.text.chat_template import ChatTemplates
from ...model_files.text.errors import TokenizerLoadError
from ...model_files.text.load import find_chat_template, load_tokenizer
from ...model_runner.errors import NotEnoughMemory
from ...model_runner.kv.size import (
    PoolRequest,
    WindowRequest,
    choose_max_total_tokens,
    choose_pool_tokens,
    layers_apart,
    piece_of,
)
from ...model_runner.options import WorkerOptions
from ...runtime.machine.memory import Memory, host_memory
from .finding import Finding, ok, problem, warning

GIB = 2**30
VALUE_BYTES = 2
"""Bytes of a bfloat16 value, the default type of weights and KV."""
EMBEDDINGS = "token_embd.weight"
"""A GGUF's name for the table of embeddings, which is read as plain numbers beside its blocks."""
TOPIC = "model"
ADVICE = {
    ModelNotFound: "Check --model-path.",
    UnsupportedModel: "README.md names the families that are served.",
    InvalidWeights: "Download or convert it again.",
}


def look_at_model(path: str, has_kernels: bool, revision: str | None = None) -> Iterator[Finding]:
    """Examine the model that ``path`` and ``revision`` name, its size, its tokenizer and its chat template.

    Nothing is downloaded. ``has_kernels`` says whether the CPU kernels can be used. Then a GGUF's blocks are served as
    they are.
    """
    try:
        source = resolve_model(path, revision=revision, download=False)
        is_native = choose_model_impl("auto", source) is ModelImpl.NATIVE
        model = read_spec(source) if is_native else read_foreign(source)
        tensors = tensor_sizes(source)
        if is_native and source.kind == "hf":
            refuse_stray_scales(source.path)
    except NotDownloaded as e:
        yield warning(TOPIC, str(e), "pdserve server downloads it at its first start; that needs the network.")
        return
    except ModelError as e:
        yield problem(TOPIC, str(e), ADVICE.get(type(e), ""))
        return
    values = sum(tensor.values for tensor in tensors)
    sizes = f"{values / 1e9:.2f} billion weights, a context of {model.context_length} tokens"
    if isinstance(model, ForeignModel):
        text = f"{source.path}: {model.family} with {sizes}; it would run by its own class in transformers"
        yield warning(
            TOPIC, text, "pdserve server tries at its start whether that computes right, and refuses it if not."
        )
    else:
        yield ok(TOPIC, f"{source.path}: {model.family} with {model.num_layers} layers, {sizes}")
        as_blocks = source.kind == "gguf" and has_kernels
        yield fit(model, weight_bytes(tensors, as_blocks), has_kernels and not as_blocks, host_memory())
    # The path that was found: a name would be looked up on the network again.
    yield from _texts(WorkerOptions(model_path=str(source.path)), source)


def weight_bytes(tensors: Sequence[TensorSize], as_blocks: bool) -> int:
    """Estimate the bytes of ``tensors`` in an instance. With ``as_blocks``, quantised ones stay as in the file."""
    total = 0
    for tensor in tensors:
        plain = tensor.values * VALUE_BYTES
        if not as_blocks or tensor.block_bytes is None:
            total += plain
        else:
            total += tensor.block_bytes + (plain if tensor.name == EMBEDDINGS else 0)
    return total


def page_bytes(spec: ModelSpec, page_size: int) -> int:
    """Return the bytes of a KV page of ``page_size`` tokens, all layers included, with KV as bfloat16."""
    return spec.num_layers * page_size * spec.kv_elements * VALUE_BYTES


def fit(spec: ModelSpec, weights: int, are_packed: bool, memory: Memory) -> Finding:
    """Check that ``weights`` (bytes) and a KV pool fit into the host's ``memory``, by the rule of the model worker.

    ``are_packed``: the kernels copy the weights into their own order, so these count twice until the last layer is
    done.
    """
    options = WorkerOptions()
    most = options.max_running_requests * (spec.context_length + options.page_size - 1)
    request = PoolRequest(options.max_total_tokens, options.mem_fraction_static, options.page_size, most)
    needs = f"about {weights / GIB:.2f} GiB of weights{' (twice that while they are packed)' if are_packed else ''}"
    if weights * (1 + are_packed) >= memory.free:
        return problem(
            "fit",
            f"{needs}, and {memory.free / GIB:.2f} GiB of memory are free",
            "Take a smaller or quantised model, free memory, or raise the limit.",
        )
    loaded = memory._replace(free=memory.free - weights)
    try:
        tokens, nbytes = _pool(spec, options, request, weights, loaded)
    except NotEnoughMemory as e:
        return problem("fit", str(e))
    pool = f"a KV pool of {tokens} tokens ({nbytes / GIB:.2f} GiB)"
    text = f"{needs} and {pool} on the processor; {memory.free / GIB:.2f} GiB of memory are free"
    if tokens < spec.context_length:
        return warning("fit", text, "The pool holds less than one full context; raise --mem-fraction-static.")
    return ok("fit", text)


def _pool(
    spec: ModelSpec, options: WorkerOptions, request: PoolRequest, weights: int, memory: Memory
) -> tuple[int, int]:
    """Return the size of a unified server's KV pool in tokens, and its bytes. Raises ``NotEnoughMemory``.

    ``request``: what the options ask for. ``weights``: bytes of the weights. ``memory``: the host's after loading them.
    If layers with a sliding window have a pool of their own, only the bytes include it.
    """
    page, size = page_bytes(spec, options.page_size), options.page_size
    windows = layers_apart(options, without_idle_windows(spec))
    if not windows:
        tokens = choose_max_total_tokens(request, page, weights, memory, "cpu")
        return tokens, (tokens // size + 1) * page
    window_page = page // spec.num_layers * len(windows)
    asked = WindowRequest(
        max(windows.values()), spec.context_length, piece_of(options, "cpu"), options.max_running_requests
    )
    both = (page - window_page, window_page)
    kept, windowed = choose_pool_tokens(request, asked, both, weights, memory, "cpu")
    return kept, (kept // size + 1) * both[0] + (windowed // size + 1) * both[1]


def _texts(options: WorkerOptions, source: ModelSource) -> Iterator[Finding]:
    try:
        tokenizer = load_tokenizer(options)
        tokens = len(tokenizer.encode_batch(["The capital of France is"], add_special_tokens=True)[0])
        yield ok("tokenizer", f"reads 5 words as {tokens} tokens")
        template = find_chat_template(options, tokenizer)
        if template is not None:
            ChatTemplates(template, tokenizer.special_tokens)
    except TokenizerLoadError as e:
        yield problem("tokenizer", str(e))
        return
    if template is None:
        advice = "/v1/chat/completions will answer 400; give a template with --chat-template."
        yield warning("template", f"{source.path} has no chat template", advice)
    else:
        yield ok("template", "the model has a chat template, which compiles")
