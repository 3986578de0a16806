"""One of two processes that train on half a batch each: writes the gradients that DistributedDataParallel leaves.

python output_worker.py RANK FOLDER        FOLDER holds batch.pt, and a saved model in each of its folders
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank as fr


class Loss(nn.Module):
    """Module to wrap: its forward pass is the loss."""

    def __init__(self, model: fr.LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return self.model.loss(ids, targets, label_smoothing=smoothing)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit)
    try:
        write_gradients(rank, folder)
    finally:
        dist.destroy_process_group()


def write_gradients(rank: int, folder: Path) -> None:
    ids, targets = torch.load(folder / "batch.pt")
    mine = slice(rank * len(ids) // 2, (rank + 1) * len(ids) // 2)
    for saved in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = fr.LanguageModel.load(saved).train()
        wrapped, found = DistributedDataParallel(Loss(model)), {}
        for smoothing in (0.0, 0.1):  # twice: the second pass finds what the first one left in the buckets
            model.zero_grad()
            wrapped(ids[mine], targets[mine], smoothing).backward()
            found[smoothing] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.save(found, folder / f"{saved.name}-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
