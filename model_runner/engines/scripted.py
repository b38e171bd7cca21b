"""An engine that follows a script instead of computing a model: ``--load-format script``.

Only the forward pass is replaced. Its "keys" are the token ids themselves, kept in the KV pool like any model's. Each
pass reads the whole sequence back from the pool and finds the next token of the scripted output. So prefix caching,
hand-overs and migrations are real: a page with wrong contents gives a wrong token.

The model's folder has its config.json, its tokenizer, and script.json: a list of ``{"contains": ..., "output": ...}``.
Of the entries with a ``contains`` that is in the prompt, the one that ends last in it is chosen, so the last message
decides.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ...messages.base import I32
from ...model_files.errors import UnsupportedModel
from ...model_files.text.load import load_tokenizer
from ...model_files.text.text_tokenizer import TextTokenizer
from ..batch.host_batch import HostBatch
from ..cpu_engine.team import Team
from ..kv.pools import Pools
from ..sampling.native import NativeSampler
from ..sampling.row_params import F32
from .base import Engine
from .load_setup import Loaded, Native, Setup

FILE = "script.json"
SCRIPTED_LOGIT = 100.0
"""Logit of the scripted token; all others have 0."""
CACHED_OUTPUTS = 256
"""Maximum number of prompts with a remembered output."""


class ScriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer of a script."""

    output: str
    """Text to generate; special tokens by their names."""
    contains: str = ""
    """Text of the prompts that get it; empty: prompts that no other entry is for."""


class Script:
    """Outputs by prompt, as token ids that end with the first EOS token."""

    def __init__(self, entries: list[ScriptEntry], tokenizer: TextTokenizer) -> None:
        self._entries = entries
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_ids[0]
        self._output = lru_cache(CACHED_OUTPUTS)(self._find)

    def token(self, prompt: I32, index: int) -> int:
        """Return the token at ``index`` of the scripted output for a prompt; EOS beyond its end.

        Without a matching entry it is always EOS. ``prompt``: its token ids.
        """
        output = self._output(prompt.tobytes())
        return output[index] if index < len(output) else self._end

    def _find(self, prompt: bytes) -> list[int]:
        ids = np.frombuffer(prompt, np.int32).tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        ends = [text.rfind(entry.contains) + len(entry.contains) for entry in self._entries]
        matching = [i for i, entry in enumerate(self._entries) if entry.contains in text]
        if not matching:
            return []
        chosen = self._entries[max(matching, key=lambda i: (ends[i] * bool(self._entries[i].contains), -i))]
        return self._tokenizer.encode_batch([chosen.output], add_special_tokens=False)[0]


def read_script(folder: Path) -> list[ScriptEntry]:
    """Read script.json in a model's folder. Raises ``UnsupportedModel`` if it is missing or invalid."""
    file = folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[ScriptEntry])
    except (OSError, msgspec.MsgspecError) as e:
        raise UnsupportedModel(
            f'--load-format script: {file} is not usable: {e}; write a list of {{"contains": TEXT, "output": TEXT}}'
        ) from e


class ScriptedEngine(Engine):
    """Follows a script; see the module."""

    attention_backend = "script"
    step_weight_bytes = 1

    def __init__(self, pools: Pools, script: Script, vocab_size: int, hidden_size: int, team: Team) -> None:
        super().__init__(pools, clears_begun_pages=False)
        self.sampler = NativeSampler(team)
        self._script = script
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        pool = pools.blocks[0]
        page_size = pool.layout.page_size
        keys = pool.data[:, 0, : page_size * pool.head_bytes].reshape(-1, page_size, pool.head_bytes)
        self._ids = keys[:, :, :4].view(np.int32)[:, :, 0]
        """[P, page_size]: token ids, in the first bytes of each key of the first layer's first head."""

    def host_logits(self, batch: HostBatch) -> F32:
        """Store the token ids in the pool as KV, and return logits in which the script's next token is the likeliest.

        It has ``SCRIPTED_LOGIT``, and all others have 0. Logits within a prompt are all 0. A token's hidden state is a
        wave with the frequency of its id.
        """
        waves = np.outer(batch.input_ids[batch.hidden.tokens] + 1, np.arange(1, self._hidden_size + 1))
        batch.hidden.states = np.cos(waves).astype(np.float32)
        size = self._ids.shape[1]
        self._ids[batch.out_cache_loc // size, batch.out_cache_loc % size] = batch.input_ids
        logits = np.zeros((len(batch.logit_indices), self._vocab_size), np.float32)
        entries = np.searchsorted(np.cumsum(batch.q_lens), batch.logit_indices, side="right")
        for at, (entry, index) in enumerate(zip(entries, batch.logit_indices, strict=True)):
            known = int(batch.positions[index]) + 1
            prompt_len = known if batch.prompt_lens is None else int(batch.prompt_lens[entry])
            if known >= prompt_len:
                slots = batch.req_to_token[batch.rows[entry], :prompt_len]
                prompt = self._ids[slots // size, slots % size]
                logits[at, self._script.token(prompt, known - prompt_len)] = SCRIPTED_LOGIT
        return logits

    def drop_weights(self) -> None:
        """Do nothing: a script has no weights."""

    def take_weights(self) -> None:
        """Do nothing: a script has no weights."""


def load_scripted(setup: Setup, native: Native) -> Loaded:
    """Read the script, and make its KV pools and its engine. Raises ``ModelError``.

    The fingerprint is that of the script.
    """
    options, spec = setup.options, native.spec
    if native.part.shard is not None or setup.device.beside or native.part.windows or spec.latent_dim is not None:
        raise UnsupportedModel("--load-format script needs one rank, --device cpu, and plain attention in every layer")
    entries, tokenizer = read_script(setup.source.path), load_tokenizer(options)
    if not tokenizer.eos_ids:
        raise UnsupportedModel(f"--load-format script: {setup.source.path} names no EOS token, which ends an output")
    maker = native.make_pool_maker(setup, "blocks")
    pools, _ = maker.make(0)
    team = Team(1, None, setup.threads.spin_us)
    engine = ScriptedEngine(pools, Script(entries, tokenizer), spec.vocab_size, spec.hidden_size, team)
    digest = xxhash.xxh3_64(msgspec.json.encode(entries)).hexdigest()
    return Loaded(pools, engine, "none", None, digest, weight_bytes=0)
