"""Changes of a layer's projections: what the maps of heads are, and the low rank that they are written with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.fitting.layer_changes import LayerChanges


class Projections(torch.nn.Module):
    """Of three heads of queries and one of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(32, 24, bias=True), torch.nn.Linear(32, 8, bias=False)


def with_maps() -> tuple[Projections, Any, torch.Tensor]:
    torch.manual_seed(0)
    module = Projections()
    changes = LayerChanges(module, ("q_proj", "k_proj"), 8, torch.Generator())
    for weights in changes.weights():
        for weight in weights:
            torch.nn.init.normal_(weight)
    return module, changes, torch.randn(1, 300, 32)


@torch.no_grad()
def test_a_map_of_each_head_is_a_change_of_its_rows() -> None:
    """Not of its biases, which low-rank changes cannot be of. With all ranks the change is the same."""
    module, changes, states = with_maps()
    expected = {}
    for name, linear in module.named_children():
        change = changes.by_name[name]
        weight, by_head = (linear.weight + change.b @ change.a).double(), change.maps.double()
        heads = [rows + of_head.T @ rows for rows, of_head in zip(weight.split(8), by_head, strict=True)]
        expected[name] = states.double() @ torch.cat(heads).T + (0 if linear.bias is None else linear.bias.double())

    def found() -> dict[str, torch.Tensor]:
        with changes.in_place():
            return {name: linear(states).double() for name, linear in module.named_children()}

    with torch.enable_grad():  # as in a step
        torch.testing.assert_close(found(), expected, rtol=1e-4, atol=1e-3)
    changes.reduce(32)
    torch.testing.assert_close(found(), expected, rtol=1e-4, atol=1e-3)
    plain = module.q_proj(states)
    assert not torch.allclose(plain.double(), expected["q_proj"], atol=0.1)


@torch.no_grad()
def test_low_rank_changes_are_the_best_of_their_rank() -> None:
    """The squared error is that of the singular values which are left out. Inputs in no step do not count."""
    module, changes, states = with_maps()
    unchanged = module.q_proj(states)
    with changes.in_place():
        module.q_proj(10 * torch.randn_like(states))
    with torch.enable_grad(), changes.in_place():
        right = module.q_proj(states)
        module.k_proj(states)
    weights = changes.reduce(5)
    with changes.in_place():
        found = module.q_proj(states)
    sizes = torch.linalg.svdvals((right - unchanged)[0].double())
    left = float((found - right).double().square().sum())
    assert left == pytest.approx(float(sizes[5:].square().sum()), rel=1e-4)
    a, b = (weights[f"q_proj.lora_{which}.default.weight"] for which in "AB")
    torch.testing.assert_close(found, unchanged + states @ a.T @ b.T, rtol=1e-4, atol=1e-3)
