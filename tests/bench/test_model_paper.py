"""MODeL's experiments: what PyTorch is taken to do, the averages, and the figures."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from bench.model_paper import AVERAGED, COLUMNS, averages, seconds_in_words
from bench.model_paper_networks import INPUTS, NETWORKS, network
from bench.models import Entry

KIB = 2**10


def _entry(layers: int = 3, width: int = 256) -> Entry:
    return Entry(
        "stack",
        lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        lambda batch_size: (torch.ones(batch_size, width), torch.ones(batch_size, width)),
        lambda model, x, y: mse_loss(model(x), y),
        "",
    )


def test_eleven_networks_have_inputs_of_two_kinds():
    assert len(NETWORKS) == 11
    shapes = {inputs: network("ResNet3D", inputs).make_batch(2)[0].shape for inputs in INPUTS}
    assert shapes == {"paper": (2, 3, 1, 112, 112), "list": (2, 3, 16, 112, 112)}
    assert [network(name, "paper").make_batch(2)[0].shape for name in ("BERT", "XLM-R", "GPT-2")] == [(2, 4)] * 3
    assert network("ViT", "paper") is network("ViT", "list")
    with pytest.raises(ValueError, match="expected one of paper, list"):
        network("ViT", "other")


def test_pytorch_holds_gradients_until_after_the_step():
    from bench.model_paper_step import InPyTorch, captured_step

    eager = InPyTorch(captured_step(_entry(), 4))
    weight, row = 256 * 256 * 4, 4 * 256 * 4
    assert sorted(filter(None, eager.resident)) == [row, row, weight, weight, weight]
    until_the_end = eager.buffers.size_bytes[eager.buffers.end == eager.buffers.end.max()]
    assert sorted(filter(None, until_the_end.tolist())) == [row, weight, weight, weight]  # the loss's elements, and gradients
    found = eager.replayed()
    assert found.settled
    assert found.live_bytes == sum(eager.resident) + eager.buffers.lower_bound_bytes


def test_pytorch_1_11_keeps_gradients_and_adds_to_them():
    from bench.model_paper_step import InPyTorch, captured_step

    eager = InPyTorch(captured_step(_entry(layers=40), 4))
    weight = 256 * KIB
    today, then = eager.replayed(), eager.replayed_1_11()
    assert then.settled
    # Kept: 40 gradients; beside them one that was just computed, while today the last of 40 is the peak.
    assert weight <= then.live_bytes - today.live_bytes < 2 * weight


def test_the_plan_of_a_small_network_has_no_fragmentation_and_needs_less():
    from bench.model_paper_step import InPyTorch, captured_step, planned_step

    captured = captured_step(_entry(layers=20), 4)
    found, eager = planned_step(captured), InPyTorch(captured)
    assert found.fragmentation == 0
    assert found.whole_bytes == found.plan.peak_bytes < eager.replayed().live_bytes
    assert found.reserved_bytes(eager.resident) > found.whole_bytes
    assert eager.placed_fragmentation() == 0
    assert set(found.seconds) == {"order_s", "place_s", "planning_cpu_s"}


def _row(name: str, batch_size: int, value: float) -> dict[str, object]:
    return {"network": name, "inputs": "paper", "batch_size": batch_size, **dict.fromkeys(AVERAGED, value)}


def test_averages_are_over_networks_and_stand_beside_the_papers():
    found = averages([_row("a", 1, 0.25), _row("b", 1, 0.75), _row("a", 2, 1.0)])
    assert [(line["network"], line["batch_size"]) for line in found] == [("mean", 1), ("MODeL", 1), ("mean", 2)]
    assert found[0]["saving"] == 0.5
    assert found[1]["saving"] == 0.314
    assert all(set(line) <= set(COLUMNS) for line in found)


def test_seconds_are_told_as_median_and_worst():
    told = seconds_in_words([_row("a", 1, each) for each in (1.0, 2.0, 6.0)])
    assert told.count("median 2.00 s, worst 6.00 s, mean 3.00 s") == 2


def test_four_figures_are_drawn_for_each_kind_of_inputs(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.model_paper_plots import draw

    files = draw([_row("a", 1, 0.5), _row("b", 32, 0.25)], "figures", tmp_path)
    assert [path.name for path in files] == [f"figure{number}_paper.png" for number in (5, 6, 7, 8)]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60 * KIB for path in files)
