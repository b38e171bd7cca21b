"""What the lead of a host does for the exchanges of its ranks with those of other hosts."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from ...model_files.errors import UnsupportedModel
from ..cpu_engine.ranks import Exchange, NativeRanks
from .process_end import end_after_watch
from .world import World


class Carrier:
    """Brings parts of sums, and columns of logits, from host to host: ``agree`` once, then ``carry`` within passes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def agree(self, pages: int, identity: str) -> int:
        """Return the smallest ``pages`` of all hosts, the KV pages that each has room for.

        Every host's lead must call this. ``identity``: equal on all hosts that serve the same. Raises
        ``UnsupportedModel`` if it differs.
        """
        own = torch.tensor([pages, xxhash.xxh3_64_intdigest(identity.encode()) >> 1])
        answers = [answer.tolist() for answer in self._world.gather(own)]
        for node, (_, theirs) in enumerate(answers):
            if theirs != answers[0][1]:
                raise UnsupportedModel(
                    f"--node-rank {node} serves something else than --node-rank 0: start all hosts with the same model "
                    "and the same options; a processor that lacks what the CPU kernels need is a difference, too"
                )
        return int(min(answer[0] for answer in answers))

    def carry(self, memory: NativeRanks, what: Exchange, exchange: int, count: int) -> None:
        """Exchange partial sums or logits in ``memory`` with the other hosts, by torch.distributed; wait for them.

        ``exchange``: number of the exchange, or of the slice of logits. ``count``: floats of a part, or rows of logits.
        The C++ engine calls this within a pass, so a failure ends the process.
        """
        try:
            if what is Exchange.PARTS:
                self._carry_parts(torch.from_numpy(memory.parts(exchange, count)))
            else:
                self._carry_logits(torch.from_numpy(memory.logits(count, exchange)))
        except BaseException as e:  # noqa: BLE001
            # An exception would be lost in the engine, and every rank would wait for ever.
            end_after_watch("what was to be summed up over all hosts did not come", e)

    def _carry_parts(self, parts: Tensor) -> None:
        place = self._world.place
        own = parts[place.first : place.first + place.local_size].contiguous()
        for node, theirs in enumerate(self._world.gather(own)):
            if node != place.node:
                parts[node * place.local_size : (node + 1) * place.local_size] = theirs

    def _carry_logits(self, logits: Tensor) -> None:
        place = self._world.place
        ends = [logits.shape[1] * node * place.local_size // place.size for node in range(place.nodes + 1)]
        for node in range(place.nodes):
            columns = logits[:, ends[node] : ends[node + 1]]
            given = columns.contiguous()
            self._world.broadcast(given, node)
            if node != place.node:
                columns.copy_(given)
