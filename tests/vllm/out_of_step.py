"""One of two workers, a process of its own, of which the first one fails between the tensors that both hand over."""

from __future__ import annotations

import json
import sys

import torch

from kvwire.engines.vllm.shards import Shards
from kvwire.errors import KvwireError


class Unreadable:
    """What is handed over where a worker has no memory left."""

    def contiguous(self) -> None:
        """Fail."""
        msg = "no memory"
        raise RuntimeError(msg)


def main(place: str, rank: int) -> None:
    """Tell how the first, the second and all later exchanges ended."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    shards, told = Shards(range(2)), []
    assert shards.agree(True)
    shards.gather(torch.ones(2))
    for own in (torch.ones(2) if rank else Unreadable(), torch.ones(2)):
        try:
            shards.gather(own)
        except (RuntimeError, KvwireError) as error:
            told.append(type(error).__name__)
    try:
        shards.agree(True)
    except KvwireError as error:
        told.append(str(error))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
