"""Make a transformers model's rows independent of how many rows a forward has.

Two things depend on it. Matrix products choose their order of sums by the number of rows: every nn.Linear and Conv1D
is given the invariant kernel. And torch computes transcendental functions (SiLU, GELU, cosine, ...) with vector code
except for the last few elements of a thread's share, whose scalar code rounds otherwise: these functions are applied to
pieces that one thread computes without a rest. Norms and softmax work on each row by itself already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from specserve.core.errors import ModelLoadError
from specserve.models.numerics import LinearFactory

# A multiple of two vectors of any machine and dtype: torch's loops take two at a time.
_VECTORS = 64
# Elements below which torch does not share a loop among threads: 32768, and 2048 where it calls a vector math library.
_PIECE = 16384
_LIBRARY_PIECE = 1920
_ACTIVATIONS = ("silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "logsigmoid", "pow", "rsqrt", "log1p")
_LIBRARY = ("tanh", "sigmoid", "exp", "exp2", "expm1", "cos", "sin", "erf", "erfc", "log", "log2", "sqrt")


def _functions(names: Sequence[str], piece: int) -> dict[Callable[..., Any], int]:
    places = (torch, torch.Tensor, F)
    return {getattr(place, name): piece for name in names for place in places if hasattr(place, name)}


_PIECES = _functions(_ACTIVATIONS, _PIECE) | _functions(_LIBRARY, _LIBRARY_PIECE)


class RowwiseMath(TorchFunctionMode):
    """Inside, transcendental functions give each element the same bits wherever it stands in its tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        piece = _PIECES.get(func)
        if piece is None or not args or not _is_plain(args, kwargs):
            return func(*args, **kwargs)
        x = args[0]
        padded = F.pad(x, (0, -x.shape[-1] % _VECTORS)).contiguous()
        parts = [func(part, *args[1:], **kwargs) for part in torch.split(padded.view(-1), piece)]
        return torch.cat(parts).view(padded.shape)[..., : x.shape[-1]]


def _is_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """A function of one floating-point tensor with elements, and otherwise of numbers and words."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
        return False
    return not any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))


def make_invariant(model: Any) -> None:
    """Replace the matrix products of a model, in place. Run it inside RowwiseMath.

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
