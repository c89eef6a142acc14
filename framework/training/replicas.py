"""Means over the ranks that train replicas of one model, taken beside DistributedDataParallel and its reducer."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn


@torch.no_grad()
def averaged(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Return the mean over the ranks of each tensor, by one all-reduce for each dtype."""
    found: list[Tensor] = [*tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in one order on all ranks
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        distributed.all_reduce(flat, group=group)
        sizes = [tensors[place].numel() for place in places]
        parts = torch.split(flat / distributed.get_world_size(group), sizes)
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view_as(tensors[place])
    return found


def average_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Replace gradients by their means over the ranks; a parameter that no rank has a gradient of is left without."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    shares = torch.tensor([float(parameter.grad is not None) for parameter in trained])
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained]
    *means, has_any = averaged([*gradients, shares.to(gradients[0].device)], group) if trained else [shares]
    for parameter, mean, has in zip(trained, means, has_any.tolist(), strict=True):
        parameter.grad = mean if has else None
