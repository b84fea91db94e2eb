"""Gradients of several processes travel together, in buckets."""

from __future__ import annotations

import torch

from lowtide.capture.ranks.data_parallel import buckets


def test_gradients_travel_in_order_up_to_the_size_of_a_bucket():
    def parameter(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros(count, dtype=dtype, requires_grad=True)
        made.grad = torch.zeros_like(made)
        return made

    sizes = [parameter(10), parameter(200), parameter(20), parameter(5, torch.float64), parameter(60), parameter(30)]
    found = buckets(sizes, {each: each.grad for each in sizes}, 300)
    assert [[each.numel() for each in bucket] for bucket in found] == [[200], [10, 20, 60], [5], [30]]
