"""Weights that bitsandbytes holds in 8 or 4 bits, as shapes: what they take, and what a layer makes of them as it runs.

Quantised are the linear layers but the head, as ``from_pretrained`` does it; the embedding, the norms and experts that
are one tensor stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# NF4 with nested constants (Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section 3): one constant of 8 bits for 64
# weights, and one in float32 for 256 of those: 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits a weight.
_WEIGHTS_BLOCK, _CONSTANTS_BLOCK = 64, 256


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is held in 8 or 4 bits, without data.

    Of 4 bits a forward makes the whole weight in the dtype it computes in, and the backward pass makes it again
    (bitsandbytes' ``MatMul4Bit``); nothing of it is kept between them.

    Args:
        linear: On the meta device.
        bits: 8 or 4.
    """

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        numbers, self.compute_dtype = linear.weight.numel(), linear.weight.dtype
        if bits == 4:
            blocks = math.ceil(numbers / _WEIGHTS_BLOCK)
            size, constants = math.ceil(numbers / 2), blocks + 4 * math.ceil(blocks / _CONSTANTS_BLOCK)
        else:
            size, constants = numbers, 4 * linear.out_features  # a scale in float32 for each row
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("constants", torch.empty(constants, dtype=torch.uint8, device="meta"))
        self.bias = linear.bias
        self.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # PyTorch's name
        rows = input.to(self.compute_dtype)
        product: torch.Tensor = _Product.apply(rows, self.out_features)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return product.to(input.dtype).clone()  # PEFT's layer around it takes a copy


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.shape = out_features, rows.shape[-1]
        return rows @ rows.new_empty(ctx.shape).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None


def quantise_shapes(model: PreTrainedModel, bits: int) -> list[QuantisedLinear]:
    """Put layers with weights in 8 or 4 bits into a model on the meta device, and return them."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    made = {name: QuantisedLinear(module, bits) for name, module in linears if module is not head}
    for name, module in made.items():
        model.set_submodule(name, module)
    return list(made.values())
