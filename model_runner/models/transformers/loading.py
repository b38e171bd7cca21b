"""Brings a model by transformers' own class: found, loaded, tried, checked. Everything else is refused, and named."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ....model_files.errors import InvalidWeights, UnsupportedModel, brief
from ....model_files.foreign_config import CONFIG, ForeignModel, layer_types_refusal
from ....model_files.tensor_names import is_not_needed
from ...kv.layout import KVShape
from .attention_check import check_modules
from .interface import register
from .model import TransformersModel
from .self_check import check_against_eager
from .trial import find_attention

log = logging.getLogger(__name__)

OLDEST = 5
"""Oldest major version of transformers with the interface that is used here."""
ADVICE = "correct it, or download it again"
TRIAL_TOKENS, CHECK_TOKENS = 8, 40


class Loaded(NamedTuple):
    """``shape``: of the KV pool. ``weights``: by transformers' names. ``config``: what transformers read of it."""

    model: TransformersModel
    shape: KVShape
    weights: dict[str, Tensor]
    config: dict[str, Any]


class LoadRequest(NamedTuple):
    """How to load. ``folder``: the model's. ``context_length``: longest sequence to serve, in tokens."""

    folder: Path
    described: ForeignModel
    context_length: int
    dtype: torch.dtype
    device: torch.device
    load_format: str
    seed: int


def load_transformers_model(how: LoadRequest) -> Loaded:
    """Load a model by transformers' own class, check its attention, and make it ready to run on a KV pool.

    Raises ``UnsupportedModel`` or ``InvalidWeights``.
    """
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise UnsupportedModel(f"--model-impl transformers needs transformers {OLDEST}, not {transformers.__version__}")
    try:
        config = _read_config(how)
        model_class = _choose_class(config)
        model = _load(how, config, model_class)
        return _make_ready(how, model)
    except InvalidWeights:
        raise
    except UnsupportedModel as e:
        raise UnsupportedModel(f"architecture {how.described.family!r} can't be served by transformers: {e}") from e
    except Exception as e:
        # Broad: a class that is strange to this way of running it can raise anything; that it does is the answer.
        raise UnsupportedModel(
            f"architecture {how.described.family!r} can't be served by transformers {transformers.__version__}: "
            f"{e.__class__.__name__}: {_first_line(e)}"
        ) from e


def _read_config(how: LoadRequest) -> Any:
    if how.described.family not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no such architecture, and code that comes with a model is "
            "never run (trust_remote_code)"
        )
    file = how.folder / CONFIG
    try:
        return AutoConfig.from_pretrained(how.folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:
        # Broad: every config class checks its own keys by errors of its own, which name key and value.
        raise UnsupportedModel(f"{file} is no usable model config: {brief(e)}; {ADVICE}") from e


def _choose_class(config: Any) -> Any:
    """Return transformers' causal LM class for ``config``. Raises ``UnsupportedModel`` if it can't be run here."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel("it is no causal language model")
    if config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models are not supported")
    if config.get_text_config() is not config:
        raise UnsupportedModel("models of more than text are not supported")
    reason = layer_types_refusal(getattr(config, "layer_types", None))
    if reason is not None:
        raise UnsupportedModel(reason)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel("latent attention (MLA), whose keys and values have different sizes, is not supported")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    if config.architectures and model_class.__name__ not in config.architectures:
        raise UnsupportedModel(f"its class is {', '.join(config.architectures)}, not {model_class.__name__}")
    if model_class._is_stateful:
        raise UnsupportedModel("state-space and other recurrent layers are not supported")
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModel("its class does not use transformers' attention interface")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel("its class takes no positions (position_ids)")
    return model_class


def _load(how: LoadRequest, config: Any, model_class: Any) -> Any:
    transformers.utils.logging.disable_progress_bar()
    # Attention comes by our names later; what can be chosen for it does not matter before.
    common = {"dtype": how.dtype, "attn_implementation": "eager"}
    try:
        if how.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(how.seed)
                model = model_class._from_config(config, **common)
        else:
            model = _load_weights(how.folder, config, model_class, common)
    except KeyError as e:
        # Classes look up the function of a rope by its type, and some have types of their own.
        if e.args and e.args[0] in _rope_types(config):
            raise UnsupportedModel(
                f"{how.folder / CONFIG}: rope_type {e.args[0]!r} is unknown to its class; {ADVICE}"
            ) from e
        raise InvalidWeights(f"transformers can't load {how.folder}: KeyError: {e}") from e
    return model.to(how.device).eval().requires_grad_(False)


def _rope_types(config: Any) -> list[object]:
    """Return the type of the rope in ``config`` or, if each type of layers has a rope, those of all."""
    stated = getattr(config, "rope_parameters", None) or {}
    return [rope.get("rope_type") for rope in (stated, *stated.values()) if isinstance(rope, dict)]


def _load_weights(folder: Path, config: Any, model_class: Any, common: dict[str, Any]) -> Any:
    try:
        model, report = model_class.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **common
        )
    except KeyError:
        raise
    except Exception as e:
        # Broad: files that are damaged, cut or of other shapes raise as many kinds of exceptions as there are readers.
        raise InvalidWeights(f"transformers can't load {folder}: {e.__class__.__name__}: {_first_line(e)}") from e
    # Transformers draws at random what a checkpoint lacks, and goes on.
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(str(name) for name in report.get(what) or () if not is_not_needed(str(name)))
        if names:
            raise InvalidWeights(
                f"the checkpoint in {folder} has {len(names)} {what.replace('_', ' ')}, {names[0]!r} among them"
            )
    return model


def _make_ready(how: LoadRequest, model: Any) -> Loaded:
    register()
    tokens = torch.arange(TRIAL_TOKENS, device=how.device) * 7919 % how.described.vocab_size
    layers = find_attention(model, tokens, how.context_length)
    spec = layers[0].spec
    shape = KVShape(len(layers), spec.kv_heads, spec.head_dim)
    ours = TransformersModel(model, layers)
    with torch.inference_mode():
        check_modules(model, layers, torch.arange(CHECK_TOKENS, device=how.device) * 7919 % how.described.vocab_size)
    like = torch.empty(0, dtype=how.dtype, device=how.device)
    check_against_eager(ours, shape, how.described.vocab_size, how.context_length, like)
    ours.use_pool()
    log.info(
        "model implementation: transformers %s, %s, with attention on the KV pool by the torch backend",
        transformers.__version__,
        model.__class__.__name__,
    )
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Loaded(ours, shape, weights, _identity(model.config))


def _identity(config: Any) -> dict[str, Any]:
    """Return the config without the values that may differ between copies of one model, for its fingerprint."""
    transient = {"transformers_version", "architectures", "dtype", "_name_or_path", "use_cache"}
    return {key: value for key, value in config.to_dict().items() if key not in transient}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no details")
