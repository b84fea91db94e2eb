"""Training with tensors that go to the host and back: equal to eager bit for bit, in the memory that the plan promises.

A machine whose copies are as late as they may be stands in for a GPU: whatever does not wait as it has to is seen in the numbers.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from bench import torchvision_shim
from bench.in_values import in_values
from bench.models.char_gpt import VOCABULARY, CharGPT, Shape
from lowtide.api import variant
from lowtide.cost.memory import order_problem, pinned_bytes, simulate
from lowtide.cost.presets import preset
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Kind
from lowtide.ir.operators.nodes import is_transfer
from lowtide.lower.python import lower
from lowtide.plan.cost_report import CostReport
from lowtide.plan.plan import Plan
from lowtide.planning import machine
from lowtide.remat.write_out import rematerialise
from lowtide.runtime.copies import DirectTransfers, StreamedMemory, StreamedTransfers
from lowtide.runtime.program import Program
from lowtide.schedule import ProgramOrder
from tests.api.networks import adamw, convnet, cross_entropy, pictures, sgd, workload
from tests.interleavings import ClockedStreams
from tests.peaks import memory_profile
from tests.programs import RandomOrder
from tests.swapping import LateStreams, random_sequence, swapping
from tests.training import check


def _gpt():
    return CharGPT(Shape(blocks=2, width=16, heads=2, length=8, dropout=0.1))


def _characters():
    return torch.randint(0, VOCABULARY, (3, 8)), torch.randint(0, VOCABULARY, (3, 8))


def _next_character(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _resnet():
    torchvision_shim.install()
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def _bert():
    torchvision_shim.install()  # transformers imports torchvision
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=40, **sizes))


def _sentences():
    return {"input_ids": torch.randint(0, 40, (3, 8)), "labels": torch.randint(0, 2, (3,))}


def _own_loss(model, **batch):
    return model(**batch).loss


NETWORKS = {
    "gpt": workload(_gpt, _characters, _next_character, adamw),
    "convnet": workload(convnet, pictures, cross_entropy, sgd),
    "resnet": workload(_resnet, lambda: (torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2,))), cross_entropy, sgd),
    "bert": workload(_bert, _sentences, _own_loss, adamw),
}


@pytest.fixture
def written(request, monkeypatch):
    """Every captured graph is rewritten with a random sequence, another one for each test; what was written."""
    found, seed = [], request.node.name
    monkeypatch.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, random.Random(seed), 0.1, 0.05), found))
    return found


@pytest.fixture
def late(monkeypatch):
    """A machine whose copies are late, in the place of the one that is here."""
    streams = LateStreams()
    memory = StreamedMemory(streams)
    monkeypatch.setattr(variant, "host_memory", lambda device: memory)
    return streams


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_at_once_change_no_number(name, written):
    done = check(NETWORKS[name], options={"solver": ProgramOrder()})
    assert min(len(each.transfers) for each in written) > 30
    assert min(len(each.recomputed) for each in written) > 5
    assert "host.store(" in done.source
    assert "host.arrived(" in done.source


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_as_late_as_they_may_be_change_no_number(name, written, late):
    check(NETWORKS[name], options={"solver": ProgramOrder()})
    assert late.copied_bytes > 1000


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_nor_do_they_in_any_other_order(name, written, late):
    check(NETWORKS[name], options={"solver": RandomOrder(len(name))})
    assert late.copied_bytes > 1000


@settings(max_examples=6)
@given(st.integers(0, 2**32), st.floats(0, 0.3), st.floats(0, 0.5))
def test_nor_does_any_sequence(seed, again, away):
    memory, rng = StreamedMemory(LateStreams()), random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(variant, "host_memory", lambda device: memory)
        patched.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, rng, again, away), []))
        check(NETWORKS["convnet"], options={"solver": ProgramOrder()})


@pytest.fixture
def lending(request, monkeypatch):
    """The same where parameters and optimizer state go, too."""
    found, seed = [], request.node.name
    sequence = partial(random_sequence, rng=random.Random(seed), again=0.02, away=0.1, swap_state=True)
    monkeypatch.setattr(machine, "equal_graphs", swapping(sequence, found))
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_lent_changes_no_number(name, lending):
    done = check(NETWORKS[name], options={"solver": ProgramOrder()})
    assert done.source.count("host.empty(") > 10
    assert done.source.count("host.refill(") >= done.source.count("host.empty(")


@pytest.mark.parametrize("name", NETWORKS)
def test_nor_does_it_with_copies_as_late_as_they_may_be(name, lending, late):
    done = check(NETWORKS[name], options={"solver": ProgramOrder()})
    assert "host.empty(" in done.source
    assert late.copied_bytes > 1000


def test_nor_does_it_in_any_other_order(lending, late):
    done = check(NETWORKS["convnet"], options={"solver": RandomOrder(3)})
    assert "host.empty(" in done.source


@pytest.mark.parametrize("forgotten", ["drop", "arrived"])
def test_a_program_that_forgets_to_wait_for_what_is_lent_is_noticed(forgotten, lending, late, monkeypatch):
    monkeypatch.setattr(StreamedTransfers, forgotten, lambda *arguments: None)
    with pytest.raises(AssertionError):
        check(NETWORKS["convnet"], options={"solver": ProgramOrder()})


@pytest.mark.parametrize("forgotten", ["", "drop", "arrived", "_after_computing"])
@pytest.mark.parametrize("swap_state", [False, True])
def test_no_order_in_which_streams_may_run_is_left_to_chance(forgotten, swap_state, monkeypatch):
    """A wait that is forgotten is noticed by one of a few sequences, as not every one needs each wait; and without any nothing is."""
    for seed in range(3, 11):
        streams = _of_random_order(forgotten, swap_state, seed, monkeypatch)
        assert min(streams.work_given[name] for name in ("compute", "copies 0", "copies 1")) > 5
        if streams.races or not forgotten:
            break
    assert bool(streams.races) == bool(forgotten)


def _of_random_order(forgotten: str, swap_state: bool, seed: int, monkeypatch) -> ClockedStreams:
    streams, rng = ClockedStreams(), random.Random(seed)
    with monkeypatch.context() as patched:
        run = Program._run

        def watched(program, inputs):
            with streams.watched():
                return run(program, inputs)

        memory = StreamedMemory(streams)
        patched.setattr(variant, "host_memory", lambda device: memory)
        patched.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, rng, 0.1, 0.2, swap_state=swap_state), []))
        patched.setattr(Program, "_run", watched)
        _, step = _optimized(workspaces=False)
        if forgotten:
            patched.setattr(StreamedTransfers, forgotten, lambda *arguments: None)
        for _ in range(1 if forgotten else 3):
            step(torch.ones(16, 64))
    return streams


@pytest.mark.parametrize("streams", [False, True])
def test_a_step_that_fails_gives_back_what_it_has_borrowed(streams, lending, request, monkeypatch):
    transfers = StreamedTransfers if streams else DirectTransfers
    if streams:
        request.getfixturevalue("late")
    model, step = _optimized(workspaces=False)
    before = [(parameter.untyped_storage()._cdata, parameter.detach().clone()) for parameter in model.parameters()]
    empty, turns = transfers.empty, []

    def failing(self, tensor, copy):
        empty(self, tensor, copy)
        turns.append(tensor.untyped_storage().nbytes())
        if len(turns) == 3:
            raise KeyError("as told")

    monkeypatch.setattr(transfers, "empty", failing)
    with pytest.raises(KeyError, match="as told"):
        step(torch.ones(16, 64))
    assert turns == [0, 0, 0]
    for parameter, (storage, value) in zip(model.parameters(), before, strict=True):
        assert parameter.untyped_storage()._cdata == storage
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("forgotten", ["drop", "arrived"])
def test_a_program_that_forgets_to_wait_is_noticed(forgotten, written, late, monkeypatch):
    monkeypatch.setattr(StreamedTransfers, forgotten, lambda *arguments: None)
    with pytest.raises(AssertionError):
        check(NETWORKS["convnet"], options={"solver": ProgramOrder()})


def _tanh_net():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 32))


def _mean_square(model, x):
    return model(x).square().mean()


def _optimized(**options):
    torch.manual_seed(0)
    model = _tanh_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"solver": ProgramOrder()} | options
    return model, lowtide.optimize(model, torch.ones(16, 64), loss=_mean_square, optimizer=optimizer, **in_values(**options))


def _with_swaps(plan: Plan, seed: int) -> Plan:
    """The plan, of a graph that it came to without a limit, with a random sequence."""
    sequence = random_sequence(plan.graph, random.Random(seed), away=0.15)
    done = rematerialise(plan.graph, sequence)
    sizes = done.of_origins(plan.workspace_bytes, 0)
    footprint = simulate(order_problem(done.graph, sizes), range(len(sizes)))
    report = CostReport(tuple(sequence), 1.0, 1.0, plan.peak_bytes, len(done.recomputed), ((plan.peak_bytes, 1.0),))
    return dataclasses.replace(
        plan, graph=done.graph, order=tuple(range(len(sizes))), reuses=tuple(footprint.reuses.tolist()), workspace_bytes=sizes,
        peak_bytes=footprint.peak_bytes, lower_bound_bytes=min(plan.lower_bound_bytes, footprint.peak_bytes), cost_report=report,
        peak=memory_profile(done.graph, range(len(sizes)), sizes).snapshot(done.graph, range(len(sizes))),
        pinned_bytes=pinned_bytes(done.graph, range(len(sizes))),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_saved_plan_with_swapping_runs_in_the_memory_that_it_promises(seed, tmp_path):
    _, without = _optimized()
    planned = _with_swaps(without.plan, seed)
    planned.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    assert saved.to_json() == planned.to_json()
    model, swapping_step = _optimized(plan=saved)
    assert swapping_step.source == lower(saved)
    batch = torch.ones(16, 64)
    swapping_step(batch)
    measured = swapping_step.measure(batch)
    # Here, the host's memory is the device's: copies count as long as the program holds them.
    assert measured.peak_bytes == max(_with_host_bytes(planned))
    assert measured.end_bytes == 4  # the loss
    assert max(_with_host_bytes(planned)) > planned.peak_bytes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), _after_two_steps(), strict=True))


@pytest.mark.parametrize("lend", [False, True])
def test_what_the_search_plans_for_a_gpu_changes_no_number(lend, late):
    """Planned for a machine that is not here, saved, and run with that machine's manners."""

    def make():
        torch.manual_seed(0)
        model = CharGPT(Shape(blocks=4, width=16, heads=2, length=16, dropout=0.1))
        batch = torch.randint(0, VOCABULARY, (2, 16, 16)).unbind(0)
        return model, batch, _next_character, adamw(model)

    gpu = dataclasses.replace(
        preset("rtx3090"), launch_us=1e-4, granule_bytes=1, to_host_bytes_per_s=2e11, from_host_bytes_per_s=2e11
    )  # as fast as operators as small as these
    model, batch, loss, optimizer = make()
    settings = {"simulate": gpu, "memory": "50%", "search": lowtide.Sweep(max_states=3000), "state": "swap" if lend else "device"}
    planned = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(**settings)).plan
    assert any(map(is_transfer, planned.graph.nodes))
    assert planned.peak_bytes <= 0.5 * planned.eager_peak_bytes
    step = check(make, options={"plan": Plan.from_json(planned.to_json())})
    assert "host.store(" in step.source
    assert ("host.empty(" in step.source) == lend
    assert late.copied_bytes > 0


def _with_host_bytes(plan: Plan) -> list[int]:
    """The plan's footprint, and what is on the host meanwhile: from its store to its last use."""
    footprint = simulate(order_problem(plan.graph, plan.workspace_bytes), plan.order).footprint_bytes.tolist()
    for value in (value for node in plan.graph.nodes for value in node.results if value.storage.kind is Kind.HOST):
        uses = [place for place, node in enumerate(plan.graph.nodes) if value in (*node.inputs, *node.results)]
        for place in range(uses[0], uses[-1] + 1):
            footprint[place] += value.storage.nbytes
    return footprint


def _after_two_steps():
    torch.manual_seed(0)
    model = _tanh_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        _mean_square(model, torch.ones(16, 64)).backward()
        optimizer.step()
    return list(model.parameters())


def test_buffers_are_used_again_from_step_to_step(written, late, monkeypatch):
    _, swapping_step = _optimized(workspaces=False)
    batch = torch.ones(16, 64)
    swapping_step(batch)
    pinned = late.pinned_bytes
    for _ in range(3):
        swapping_step(batch)
    assert late.pinned_bytes == pinned > 0


def test_a_step_that_fails_in_its_midst_leaves_nothing_behind(written, late):
    _, swapping_step = _optimized(workspaces=False)
    batch = torch.ones(16, 64)
    swapping_step(batch)
    pinned = late.pinned_bytes
    real, calls = late.copy, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise MemoryError("as told")
        real(*arguments)

    late.copy = failing
    with pytest.raises(MemoryError, match="as told"):
        swapping_step(batch)
    late.copy = real
    assert not any(stream.work for stream in late.made)  # nobody copies from or to what the failed run let go
    swapping_step(batch)
    assert late.pinned_bytes == pinned


def test_a_step_with_swapping_uses_the_words_that_the_program_knows(written):
    _, swapping_step = _optimized(workspaces=False)
    assert "def step(inputs, host):" in swapping_step.source
    check_graph(written[0].graph)


def test_a_file_with_a_copy_of_another_form_is_refused():
    _, without = _optimized()
    text = _with_swaps(without.plan, 0).to_json()
    with pytest.raises(CheckError, match=r"does not have the form host.store"):
        Plan.from_json(text.replace("host.load(", "host.load(1, ", 1))
