import json
import random
from math import isnan
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost import trial, trials
from lowtide.cost.operators import operator
from lowtide.cost.trial import answer, made_ready, made_up, take_level
from lowtide.cost.trials import recipe, signature
from lowtide.cost.workspaces import made_bytes, measure_workspaces
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Kind, Node, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product

CHUNK = 4096


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    return tmp_path


def value(
    *shape: Size,
    dtype: str = "float32",
    stride: tuple[int, ...] | None = None,
    on: Value | None = None,
    name: str = "v",
    device: str = "cpu",
) -> Value:
    strides = contiguous_stride(shape) if stride is None else stride
    storage = on.storage if on else Storage(name, product(shape) * ITEM_BYTES[dtype], device, Kind.ACTIVATION)
    return Value(name, storage, dtype, shape, strides)


def node(op: str, *args: Arg, out: tuple[Value | None, ...] = (), writes: tuple[tuple[Value, Value], ...] = (), **kwargs: Arg) -> Node:
    return Node(op, args, out, tuple(kwargs.items()), writes)


def look(one: Value) -> list[object]:
    return [one.dtype, list(one.shape), list(one.stride), one.storage.device]


def workspace(one: Node) -> int:
    found = measure_workspaces([one])
    assert found.unknown == ()
    return found.nbytes[0]


def test_an_operator_that_takes_only_its_result_has_no_workspace():
    assert workspace(node("aten.mm.default", value(64, 32), value(32, 16), out=(value(64, 16),))) == 0


def test_a_temporary_is_a_workspace():
    # The mask is scaled first, into a temporary as large as the result.
    grad, mask = value(CHUNK), value(CHUNK, dtype="bool")
    found = workspace(node("aten.native_dropout_backward.default", grad, mask, 2.0, out=(value(CHUNK),)))
    assert 4 * CHUNK <= found <= 4 * CHUNK + 64


def test_a_mix_of_types_is_converted_in_a_temporary():
    half = value(CHUNK, dtype="bfloat16")
    assert workspace(node("aten.add.Tensor", value(CHUNK), half, out=(value(CHUNK),))) == 4 * CHUNK
    assert workspace(node("aten.add.Tensor", value(CHUNK), value(CHUNK), out=(value(CHUNK),))) == 0


def test_a_result_that_nobody_reads_is_a_workspace():
    both = node("aten.max.dim", value(CHUNK, 2), 1, out=(value(CHUNK), value(CHUNK, dtype="int64")))
    one = node("aten.max.dim", value(CHUNK, 2), 1, out=(value(CHUNK), None))
    assert measure_workspaces([both, one]).nbytes == (0, 8 * CHUNK)


def test_a_new_storage_that_many_outputs_share_is_counted_once():
    base = value(CHUNK)
    grads = value(3, CHUNK)
    parts = tuple(value(CHUNK, on=grads) for _ in range(2))
    assert made_bytes(node("aten.split.Tensor", base, 1, out=parts)) == 12 * CHUNK


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.sampled_from(["float32", "float64", "bfloat16"]))
def test_a_strided_argument_is_made_as_it_is(rows: int, columns: int, turned: bool, dtype: str):
    source = value(rows, columns, dtype=dtype, stride=(1, rows) if turned else (columns, 1))
    made = made_up(look(source))
    assert (tuple(made.shape), made.stride(), made.dtype) == (source.shape, source.stride, getattr(torch, dtype))
    assert made.untyped_storage().nbytes() == rows * columns * ITEM_BYTES[dtype]
    assert bool((made == 1).all())


def test_an_expanded_argument_takes_what_lies_beneath():
    made = made_up(look(value(1000, 3, stride=(0, 1))))
    assert made.untyped_storage().nbytes() == 12
    assert made_up(look(value(0, 3))).shape == (0, 3)


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"scalar", "complex32"}))
def test_every_type_can_be_made_up(dtype: str):
    made = made_up(look(value(3, dtype=dtype)))
    expected = dtype == "bool" or "float" in dtype or "complex" in dtype
    assert made.to(torch.complex128).tolist() == [expected] * 3
    assert made.element_size() == ITEM_BYTES[dtype]


def test_whole_numbers_are_valid_indices():
    found = measure_workspaces([node("aten.embedding.default", value(7, 5), value(3, dtype="int64"), out=(value(3, 5),))])
    assert found.unknown == ()


def test_views_and_numbers_are_not_run():
    base = value(CHUNK)
    nodes = [
        node("aten.view.default", base, (2, CHUNK // 2), out=(value(2, CHUNK // 2, on=base),)),
        node("py.mul", value(dtype="scalar"), 2.0, out=(value(dtype="scalar"),)),
        node("aten._local_scalar_dense.default", value(), out=(value(dtype="scalar"),)),
    ]
    found = measure_workspaces(nodes)
    assert (found.nbytes, found.unknown_nodes, found.measured_calls) == ((0, 0, 0), 0, 0)


def test_a_write_in_place_runs_on_made_up_data():
    before, source = value(CHUNK), value(CHUNK, dtype="bfloat16")
    after = Value("after", before.storage, "float32", before.shape, before.stride, version=1)
    add = node("aten.add_.Tensor", before, source, out=(after,), writes=((before, after),))
    assert workspace(add) == 4 * CHUNK


def test_running_statistics_are_made_up_too():
    mean, variance = value(8), value(8)
    writes = tuple((old, Value("new", old.storage, "float32", (8,), (1,), version=1)) for old in (mean, variance))
    outs = (value(2, 8, 4, 4), value(8), value(8))
    norm = node(
        "aten.native_batch_norm.default", value(2, 8, 4, 4), value(8), value(8), mean, variance, True, 0.1, 1e-5, out=outs, writes=writes
    )
    assert workspace(norm) >= 0


def test_equal_calls_are_run_once_and_remembered(cache: Path):
    def mm(rows: int) -> Node:
        return node("aten.mm.default", value(rows, 8), value(8, 8), out=(value(rows, 8),))

    assert measure_workspaces([mm(4), mm(4), mm(5)]).measured_calls == 2
    assert measure_workspaces([mm(4), mm(5), mm(6)]).measured_calls == 1
    assert measure_workspaces([mm(4), mm(5)], remember=False).measured_calls == 2
    assert len(list(cache.glob("workspaces-*.json"))) == 1


def test_the_number_of_threads_is_a_circumstance():
    one = node("aten.mm.default", value(4, 8), value(8, 8), out=(value(4, 8),))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        measure_workspaces([one])
        torch.set_num_threads(2)
        assert measure_workspaces([one]).measured_calls == 1
    finally:
        torch.set_num_threads(threads)


def test_what_fails_is_unknown_and_says_why():
    good = node("aten.mm.default", value(4, 8), value(8, 8), out=(value(4, 8),))
    bad = node("aten.mm.default", value(4, 8), value(7, 8), out=(value(4, 8),))
    found = measure_workspaces([bad, good, bad, good])
    assert (found.nbytes, found.unknown_nodes, found.measured_calls) == ((0, 0, 0, 0), 2, 1)
    assert [unknown.call for unknown in found.unknown] == [signature(bad)]
    assert "cannot be multiplied" in found.unknown[0].reason


def test_what_fails_is_not_remembered():
    bad = node("aten.mm.default", value(4, 8), value(7, 8), out=(value(4, 8),))
    assert measure_workspaces([bad]).unknown_nodes == measure_workspaces([bad]).unknown_nodes == 1


def test_what_is_too_large_is_not_run(monkeypatch: pytest.MonkeyPatch):
    large, huge = (node("aten.cumsum.default", value(size), 0, out=(value(size),)) for size in (CHUNK, 2**44))
    with pytest.warns(RuntimeWarning, match="not enough memory"):
        assert measure_workspaces([huge]).unknown_nodes == 1
    monkeypatch.setattr(trial, "free_bytes", lambda device: 4 * 8 * CHUNK - 1)
    with pytest.warns(RuntimeWarning, match="not enough memory to measure aten.cumsum.default.*temporaries are taken to be none"):
        found = measure_workspaces([large])
    assert "may take 32767" in found.unknown[0].reason
    monkeypatch.setattr(trial, "free_bytes", lambda device: 4 * 8 * CHUNK)
    assert measure_workspaces([large]).unknown == ()


def test_what_is_element_wise_is_never_too_large():
    found = measure_workspaces([node("aten.relu.default", value(2**44), out=(value(2**44),))])
    assert (found.nbytes, found.unknown) == ((0,), ())


def test_a_lack_of_memory_is_told_and_other_calls_are_measured(monkeypatch: pytest.MonkeyPatch):
    real = trials.Trials.level

    def lacking(self: trials.Trials, steps: dict[str, object], device: str, **ahead: bool) -> dict[str, object]:
        if "relu" in str(steps):
            return {"failure": "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.", "of_memory": True}
        return real(self, steps, device)

    monkeypatch.setattr(trials.Trials, "level", lacking)
    both = [node("aten.relu.default", value(8), out=(value(8),)), node("aten.neg.default", value(8), out=(value(8),))]
    with pytest.warns(RuntimeWarning, match="not enough memory to measure aten.relu.default") as told:
        found = measure_workspaces(both)
    assert len(told) == 1
    assert (found.unknown_nodes, found.measured_calls) == (1, 1)
    assert found.unknown[0].of_memory


def test_an_operator_that_cannot_have_its_memory_says_so():
    huge = node("aten.full.default", (2**44,), 1.0, out=(None,))
    with pytest.warns(RuntimeWarning, match="not enough memory to measure aten.full.default"):
        assert measure_workspaces([huge]).unknown[0].of_memory


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (node("aten.no_such.default", value(1), out=(value(1),)), "expected an operator of torch"),
        (node("aten.relu", value(1), out=(value(1),)), "expected an operator's name"),
        (node("aten.relu.default", value(sympy.Symbol("n")), out=(value(1),)), "expected concrete sizes"),
        (node("aten.relu.default", value(1, device="cuda:77"), out=(value(1, device="cpu"),)), ""),
    ],
)
def test_what_cannot_be_called_is_unknown(one: Node, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "free_bytes", lambda device: 2**22)
    found = measure_workspaces([one])
    assert found.unknown_nodes == 1
    assert reason in found.unknown[0].reason


def test_the_callers_modes_and_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    half = node("aten.mm.default", value(64, 64), value(64, 64), out=(value(64, 64),))
    drop = node("aten.native_dropout.default", value(CHUNK), 0.5, True, out=(value(CHUNK), value(CHUNK, dtype="bool")))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure_workspaces([half, drop])
        assert not torch.is_grad_enabled()
    assert found.nbytes[0] == 0  # under autocast it would convert
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_of_one_call_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch):
    alive, most = 0, 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(wanted: list[object]) -> torch.Tensor:
        made = made_up(wanted)
        made.guard = Counted()
        return made

    monkeypatch.setattr(trial, "made_up", counted)
    failing = node("aten.mm.default", value(2, 3), value(2, 3), out=(value(2, 3),))
    for one in (failing, *(node("aten.relu.default", value(n), out=(value(n),)) for n in range(1, 6))):
        assert ("failure" in answer(lambda one=one: take_level(recipe(one), "cpu", True))) == (one is failing)
    assert (most, alive) == (2, 0)


def test_a_signature_says_everything_but_names():
    left, right = value(2, 3, name="a"), value(3, 4, name="b")
    first = node("aten.mm.default", left, right)
    assert signature(first) == "aten.mm.default(%0:float32[2, 3]/[3, 1]@cpu, %1:float32[3, 4]/[4, 1]@cpu)"
    assert signature(node("aten.mm.default", value(2, 3, name="c"), value(3, 4, name="d"))) == signature(first)


def test_signatures_differ_where_calls_do():
    base = value(3)
    atom = Atom("dtype", "float32")
    calls = [
        node("aten.f.default", base, base),
        node("aten.f.default", base, value(3)),
        node("aten.f.default", base, value(3, dtype="int64")),
        node("aten.f.default", base, value(3, stride=(2,))),
        node("aten.f.default", base, value(3, device="cuda:0")),
        node("aten.f.default", base, (base,)),
        node("aten.f.default", base, 1),
        node("aten.f.default", base, 1.0),
        node("aten.f.default", base, True),
        node("aten.f.default", base, None),
        node("aten.f.default", base, "float32"),
        node("aten.f.default", base, atom),
        node("aten.f.default", base, x=atom),
        node("aten.f.default", base, y=atom),
        node("aten.f.out", base, y=atom),
    ]
    assert len({signature(call) for call in calls}) == len(calls)


def test_arguments_become_torchs_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "operator", lambda name: lambda *args, **kwargs: (args, kwargs))
    first, number = value(2), value(dtype="scalar")
    given = node(
        "aten.f.default", first, (first, (1, None)), Atom("device", "cpu"), number, 1j, memory_format=Atom("memory_format", "channels_last")
    )
    args, kwargs = made_ready(json.loads(json.dumps(recipe(given))))()
    assert args[1][0] is args[0]
    assert args[1][1] == [1, None]
    assert args[2:] == (torch.device("cpu"), 0.75, 1j)
    assert kwargs == {"memory_format": torch.channels_last}


def test_numbers_that_json_has_no_words_for_come_through(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "operator", lambda name: lambda *args: args)
    given = (float("inf"), -float("inf"), -0.0, 1, 1.0, True, 0.1, 10**30)
    found = made_ready(json.loads(json.dumps(recipe(node("aten.f.default", *given)))))()
    assert list(map(repr, found)) == list(map(repr, given))
    assert isnan(made_ready(json.loads(json.dumps(recipe(node("aten.f.default", float("nan"))))))()[0])


@pytest.mark.parametrize("atom", [Atom("dtype", "float32.__class__"), Atom("dtype", "float33"), Atom("layout", "")])
def test_an_atom_that_is_none_of_torchs_is_refused(atom: Atom):
    with pytest.raises(FormatError, match="expected a"):
        made_ready(recipe(node("aten.relu.default", atom)))


@pytest.mark.parametrize(
    "name", ["aten.add", "aten.add.Tensor.x", "aten.add.__class__()", "import os", "aten..add", "aten.add.Ténsor", "os.system.x"]
)
def test_only_operators_are_resolved(name: str):
    with pytest.raises(FormatError, match="expected an operator"):
        operator(name)


def test_order_of_nodes_does_not_matter():
    nodes = [node("aten.add.Tensor", value(n), value(n, dtype="bfloat16"), out=(value(n),)) for n in range(1, 30)]
    shuffled = random.Random(0).sample(nodes, len(nodes))
    found = dict(zip(shuffled, measure_workspaces(shuffled, remember=False).nbytes, strict=True))
    assert [found[one] for one in nodes] == [4 * n for n in range(1, 30)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_results_are_rounded_as_its_allocator_does():
    relu = node("aten.relu.default", value(3, device="cuda:0"), out=(value(3, device="cuda:0"),))
    assert workspace(relu) == 0
