"""A torch model's weights as arrays, for the CPU kernels to be packed from."""

from __future__ import annotations

from pdserve.model_runner.loader.arrays import as_bits
from pdserve.model_runner.loader.host_model import HostModel
from pdserve.model_runner.loader.tensors import dtype_of, to_array
from pdserve.model_runner.models.decoder import Decoder


def host_model(decoder: Decoder) -> HostModel:
    """Copy a model's weights."""
    model = HostModel(decoder.spec, dtype_of(decoder.embed_tokens))
    views = model.weights()
    for name, tensor in decoder.weights().items():
        as_bits(views[name])[...] = as_bits(to_array(tensor))
    return model
