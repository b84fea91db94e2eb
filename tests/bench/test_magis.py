import json
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import magis, magis_answers
from bench.magis_plan import Effort, Found, Timed, plan
from bench.magis_plots import draw
from bench.magis_scale import network
from bench.magis_workloads import CASES, Known, Limited
from bench.models import explicit
from bench.models.magis import ENTRIES, Block, Patches, UNet, UNetPlusPlus
from bench.models.workload import Entry, images

NETWORKS = [(case, entry) for case in CASES for entry in (*case.published, case.lean)]


def found(*frontier: tuple[int, float]) -> Found:
    return Found(1000, 900, 50, 100.0, frontier, 2.0, 1.0, 0.5, Effort(10, 300, 1.0, 0.5, 80), {0.8: 0.01, 0.4: None})


FOUND = found((200, 160.0), (380, 118.0), (600, 105.0), (790, 101.0), (900, 100.0))


@pytest.mark.parametrize(("case", "entry"), NETWORKS, ids=[f"{case.name}, {entry.name}" for case, entry in NETWORKS])
def test_every_workload_has_a_loss_that_every_parameter_serves(case, entry):
    work = entry.build(1, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        work.loss(work.model, *work.batch).backward()
    assert [name for name, parameter in work.model.named_parameters() if parameter.grad is None] == []
    bits = torch.bfloat16 if case.name in ("GPT-Neo-1.3B", "BTLM-3B") else torch.float32
    assert {parameter.dtype for parameter in work.model.parameters()} == {bits}


def test_transformers_write_their_attention_out():
    for entry, attention in ((explicit.BERT, 0.0), (explicit.BERT_DROPOUT, 0.1)):
        config = entry.build(1, "meta").model.config
        assert (config._attn_implementation, config.attention_probs_dropout_prob, config.hidden_dropout_prob) == (
            "eager",
            attention,
            attention,
        )
    for entry in (explicit.VIT, explicit.GPT_NEO_13):
        model = entry.build(1, "meta").model
        assert getattr(model, "model", model).config._attn_implementation == "eager"


def test_the_lean_networks_are_as_large_as_magis_has_them():
    """Counted by hand, from their layers: nothing but matrices."""
    parameters = {entry.name: sum(each.numel() for each in entry.build(1, "meta").model.parameters()) for entry in ENTRIES}
    assert parameters["bert-base, lean"] == 12 * 12 * 768**2
    assert parameters["gpt-neo-1.3B, lean"] == 24 * 12 * 2048**2
    assert parameters["btlm-3B, lean"] == 32 * 12 * 2560**2
    assert parameters["vit-base, lean"] == 12 * 12 * 768**2 + 768 * 1000
    assert parameters["resnet50, lean"] == 25_557_032 - 53_120 - 1000  # torchvision's without batch normalisation and the head's bias


def test_the_lean_networks_keep_their_shapes():
    torch.manual_seed(0)
    pictures = images(2, 1, 16, 24)
    assert UNet((2, 4, 6)).forward(pictures).shape == UNetPlusPlus((2, 4, 6)).forward(pictures).shape == (2, 1, 16, 24)
    assert Block(8, 2)(images(2, 5, 8)).shape == (2, 5, 8)
    patches = Patches(4)(images(2, 3, 8, 12))
    assert patches.shape == (2, 6, 48)


def test_patches_are_the_pictures_pixels():
    pictures = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    assert torch.equal(Patches(2)(pictures)[1, 3], pictures[1, :, 2:, 2:].flatten())


def test_answers_come_from_the_frontier():
    assert FOUND.overhead(0.8) == pytest.approx(0.01)
    assert FOUND.overhead(0.4) == pytest.approx(0.18)
    assert FOUND.overhead(0.19) is None
    assert (FOUND.share(0.05), FOUND.share(0.1), FOUND.share(0.0)) == (0.6, 0.6, 0.9)
    row = magis_answers.answered(FOUND)
    assert (row["overhead_at_40"], row["least_share"], row["floor_share"], row["resident_share"]) == (pytest.approx(0.18), 0.2, 0.08, 0.05)
    assert row["states_per_s"] == 600


def test_a_point_dominates_with_no_more_of_either():
    assert magis_answers.dominates(FOUND, Limited(0.4, 0.18))
    assert magis_answers.dominates(FOUND, Limited(0.38, 0.5))
    assert not magis_answers.dominates(FOUND, Limited(0.379, 0.17))
    assert not magis_answers.dominates(FOUND, Limited(0.1, 9.0))
    known = Known({"80 %": Limited(0.8, 0.02), "40 %": Limited(0.4, 0.1)}, {0.8: 0.05, 0.4: 0.36}, "net")
    row = magis_answers.known_answers(FOUND, known, "net")
    assert (row["magis_dominated"], row["magis_at_40"], row["eviction_at_80"]) == ("1 of 2: 80 %", "0.400 (+10.0%)", 0.05)
    assert row["eviction_saved"] == pytest.approx((0.8 + 0.5) / 2)
    assert "eviction_at_80" not in magis_answers.known_answers(FOUND, known, "another net")
    assert magis_answers.known_answers(FOUND, Known({}, {}), "net")["magis_dominated"] is None


def test_long_frontiers_are_thinned_and_keep_their_ends():
    long = found(*((1000 + step, 200.0 - step / 10) for step in range(1001)))
    shares = long.shares()
    assert 150 < len(shares) <= 201
    assert (shares[0], shares[-1]) == ((1.0, 1.0), (2.0, 0.0))


def test_a_small_network_is_planned_and_drawn(tmp_path):
    entry = Entry("tiny", partial(UNet, (4, 8)), lambda batch: (images(batch, 1, 32, 32), images(batch, 1, 32, 32)), CASES[3].lean.loss, "")
    planned = plan(entry, 4, search=Timed(max_states=40))
    assert (
        planned.resident_bytes < planned.effort.floor_bytes <= planned.frontier[0][0] < planned.frontier[-1][0] <= planned.eager_peak_bytes
    )
    assert 0 < planned.effort.states <= 40
    frontiers = {f"{case.name} | {case.lean.name} | recompute": planned.shares() for case in CASES}
    picture = draw(frontiers, CASES, tmp_path)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_rows_run_in_a_process_of_their_own_and_a_failure_is_told(tmp_path):
    row = magis._in_its_own_process("ResNet-50", "no such network", "recompute")
    assert row["failed"] == "StopIteration"
    answers, effort = magis_answers.tables([row, {**row, "operators": 3}])
    assert (answers.rows[0]["failed"], effort.rows[1]["operators"]) == ("StopIteration", 3)
    assert json.loads(answers.save(tmp_path).read_text())["rows"][0]["network"] == "no such network"


def test_gpt2_grows_by_blocks():
    few, many = (sum(each.numel() for each in network(layers).build(1, "meta").model.parameters()) for layers in (1, 3))
    assert many - few == 2 * (12 * 768**2 + 13 * 768)
