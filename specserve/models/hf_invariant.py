"""Make a transformers model's rows independent of how many rows a forward has.

Matrix products are what depends on the rows of a forward; every nn.Linear and Conv1D is given the invariant kernel.
What is left works on each row by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specserve.core.errors import ModelLoadError
from specserve.models.numerics import LinearFactory


def make_invariant(model: Any) -> None:
    """Replace the matrix products of a model, in place.

    Raises:
        ModelLoadError: a module multiplies by matrices in a way that is not known (mixtures of experts), named.
    """
    factory = LinearFactory("invariant")
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            _replace(module, factory, module.weight.detach(), module.bias)
        elif type(module) is Conv1D:
            _replace(module, factory, module.weight.detach().t(), module.bias)
        elif not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            raise ModelLoadError(
                f"model: {name} ({type(module).__name__}) multiplies in a way whose results depend on the batch; use "
                'numerics="fast"',
                param="numerics",
            )


def _replace(module: nn.Module, factory: LinearFactory, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    linear = factory.make(weight, None if bias is None else bias.detach())

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    module.forward = forward
