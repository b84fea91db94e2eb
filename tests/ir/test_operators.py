"""Every row of the table of operators says what torch's own tags and schemas say, or what real tensors show."""

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._ops import OpOverload

import lowtide.kernels.operators  # noqa: F401  makes lowtide's own operators known to torch
from lowtide.capture import calls
from lowtide.ir.graph import Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import ROWS, functional_base, repeatable, row_of, writes_in_place
from lowtide.ir.operators.row import Draws, Operator
from tests.graph_runs import same_bits
from tests.imports import PACKAGE
from tests.operator_calls import CALLS, nan_like

VIEW_OF_TESTS = "_test_autograd_multiple_dispatch_view"


def rows(column: str) -> list[Operator]:
    """The rows that say something in a column."""
    plain = Operator(name="")
    return [row for row in ROWS.values() if getattr(row, column) != getattr(plain, column)]


def overloads(name: str) -> list[OpOverload]:
    """The overloads that a row is about: not those with a row of their own."""
    namespace, base, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), base)
    return [getattr(packet, each) for each in overload or packet.overloads() if overload or f"{name}.{each}" not in ROWS]


def dispatched() -> Iterator[tuple[str, OpOverload]]:
    """Every operator of aten that the dispatcher knows, with its name there."""
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        op = getattr(packet, overload or "default", None) if packet is not None else None
        if isinstance(op, OpOverload):
            yield full, op


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("bitsandbytes.")])
def test_torch_has_the_operator_of_every_row(name):
    assert overloads(name)


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_every_row_says_something(row):
    assert row != Operator(name=row.name)


def test_what_draws_is_what_torch_tags():
    """An operator is tagged with the ones that write in place."""
    tagged = {functional_base(calls.name_of(op)) for _, op in dispatched() if torch.Tag.nondeterministic_seeded in op.tags}
    assert {functional_base(row.name) for row in rows("draws") if row.name.startswith("aten.")} == tagged


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.draws is Draws.WITH_PROBABILITY], ids=lambda row: row.name)
def test_a_probability_stands_where_the_row_says(row):
    for op in overloads(row.name):
        assert op._schema.arguments[row.probability].name in ("dropout_p", "dropout")


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.draws is Draws.AGAIN], ids=lambda row: row.name)
def test_what_draws_again_is_given_the_random_state(row):
    for op in overloads(row.name):
        assert {"philox_seed", "philox_offset"} <= {argument.name for argument in op._schema.arguments}


def test_views_are_what_schemas_say():
    """What torch takes apart before it runs is left out: no graph has it."""
    aliasing = {
        op._schema.name.split("::")[1]
        for full, op in dispatched()
        if any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    }
    assert {row.name.removeprefix("aten.") for row in rows("view")} == aliasing - {VIEW_OF_TESTS}


@pytest.mark.parametrize("row", rows("rebinds"), ids=lambda row: row.name)
def test_what_rebinds_gives_other_memory(row):
    tensor, base = torch.zeros(2, device="meta"), row.name.removeprefix("aten.")
    template = torch.zeros(64, device="meta")
    more = {"resize_": ([64],), "_resize_output_": ([64], tensor.device), "resize_as_": (template,), "set_": (template,)}
    getattr(torch.ops.aten, base)(tensor, *more[base])
    assert tensor.untyped_storage().nbytes() == 256


@pytest.mark.parametrize("row", rows("statistics"), ids=lambda row: row.name)
def test_statistics_are_written_though_no_schema_says_so(row):
    for op in overloads(row.name):
        arguments, at = op._schema.arguments, row.statistics
        assert [arguments[place].name for place in at.positions] == ["running_mean", "running_var"]
        assert at.flag is None or arguments[at.flag].name in ("training", "train")
        assert all(arguments[place].alias_info is None for place in at.positions), "the schema says so by now: the row can go"


_GIVEN = {
    "input": torch.arange(24.0).reshape(2, 3, 4), "weight": torch.ones(3), "bias": torch.zeros(3), "mean": torch.ones(1, 3),
    "invstd": torch.ones(1, 3), "training": True, "momentum": 0.1, "eps": 1e-5, "exponential_average_factor": 0.1, "epsilon": 1e-5,
    "cudnn_enabled": False, "count": 8, "counts": torch.ones(1), "out3": torch.empty(0, dtype=torch.uint8),
}  # fmt: skip


def _takes_statistics(op: OpOverload) -> bool:
    """Whether an operator is given running statistics of which its schema does not say that it writes them.

    Gradients aside, and what torch takes apart before it runs.
    """
    name, given = calls.name_of(op), [argument for argument in op._schema.arguments if argument.name == "running_mean"]
    left_out = "backward" in name or name.split(".")[1] in ("batch_norm", "instance_norm")
    return bool(given) and given[0].alias_info is None and not left_out


STATISTICAL = {calls.name_of(op): op for _, op in dispatched() if _takes_statistics(op)}


@pytest.mark.parametrize("name", sorted(STATISTICAL))
def test_whatever_updates_statistics_has_a_row(name):
    """As the CPU's kernel shows; what the CPU has no kernel for is taken to update them."""
    arguments, statistics = STATISTICAL[name]._schema.arguments, (torch.zeros(3), torch.ones(3))
    given = _GIVEN | dict(zip(("running_mean", "running_var"), statistics, strict=True))
    called = {argument.name: given[argument.name] if argument.name in given else torch.empty(0) for argument in arguments}
    plain = [called[argument.name] for argument in arguments if not argument.kwarg_only]
    try:
        STATISTICAL[name](*plain, **{argument.name: called[argument.name] for argument in arguments if argument.kwarg_only})
        changed = bool(statistics[0].any())
    except NotImplementedError:
        changed = True
    found = calls.written_positions(STATISTICAL[name], tuple(plain))
    assert {"running_mean", "running_var"} <= {arguments[at].name for at in found if isinstance(at, int)} or not changed
    assert (row_of(name).statistics is not None) == changed


@pytest.mark.parametrize("row", [row for row in rows("statistics") if row.statistics.without == row.name], ids=lambda row: row.name)
def test_optional_statistics_change_and_results_need_none(row):
    (op,), at = overloads(row.name), row.statistics
    args = [torch.randn(4, 3, 5), torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5]
    without = [None if place in at.positions else arg for place, arg in enumerate(args)]
    before = [args[place].clone() for place in at.positions]
    for one, two in zip(op(*without), op(*args), strict=True):
        assert torch.equal(one, two)
    assert not any(torch.equal(args[place], old) for place, old in zip(at.positions, before, strict=True))
    before = [args[place].clone() for place in at.positions]
    op(*args[: at.flag], False, *args[at.flag + 1 :])
    assert all(torch.equal(args[place], old) for place, old in zip(at.positions, before, strict=True))


_HALF, _FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("row", [row for row in rows("statistics") if row.statistics.without == row.name], ids=lambda row: row.name)
@pytest.mark.parametrize(("given", "weights"), [(_FULL, _FULL), (_FULL, None), (_HALF, _FULL), (_HALF, _HALF), (_HALF, None)])
@pytest.mark.parametrize("statistics", [_HALF, _FULL])
def test_what_is_repeated_without_statistics_gives_the_same_bits(row, given, weights, statistics):
    (op,) = overloads(row.name)
    norm = [torch.ones(3, dtype=weights), torch.zeros(3, dtype=weights)] if weights else [None, None]
    args = (torch.randn(4, 3, 5).to(given), *norm, torch.zeros(3, dtype=statistics), torch.ones(3, dtype=statistics), True, 0.1, 1e-5)
    try:
        expected = op(*args)
    except RuntimeError as error:
        assert "mixed dtype" in str(error) or "xpected" in str(error)  # noqa: PT017  no such program
        return
    again = repeatable(_node(row.name, args))
    if again is None:
        assert statistics not in (given, weights), "could be repeated"
        return
    for one, two in zip(op(*(None if arg is None else old for arg, old in zip(again.args, args, strict=True))), expected, strict=True):
        assert torch.equal(one, two)


def _node(name, args):
    """A call that writes its arguments 3 and 4."""
    values = [_value(f"v{place}", arg) if isinstance(arg, torch.Tensor) else arg for place, arg in enumerate(args)]
    writes = tuple((values[place], replace(values[place], name=f"w{place}", version=1)) for place in (3, 4))
    return Node(name, tuple(values), (_value("out", args[0]), None, None), writes=writes)


def _value(name, tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(name, Storage(name, tensor.nbytes, "cpu", Kind.BUFFER), dtype, tuple(tensor.shape), tuple(tensor.stride()))


@pytest.mark.parametrize("row", rows("functional"), ids=lambda row: row.name)
def test_the_functional_form_gives_what_is_written(row):
    (op,), form = overloads(row.name), calls.resolve(row.functional)
    assert not form._schema.is_mutable
    for tensor in (torch.full((4, 5), 0.3), torch.zeros(7)):
        args = calls.with_defaults(op, (tensor,))
        torch.manual_seed(0)
        expected = form(*args)
        torch.manual_seed(0)
        assert torch.equal(op(tensor.clone(), *args[1:]), expected)


NORMS = ("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
WITHOUT_A_CPU = {f"aten.{name}.default" for name in NORMS}  # tests/gpu/test_recurrent_on_cuda.py has cuDNN's


def _written_arguments(row):
    """Arguments of a call that writes, made anew at each call."""
    if row.statistics is not None:
        given = _GIVEN | {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
        return tuple(given[argument.name] for argument in overloads(row.name)[0]._schema.arguments)
    return (torch.linspace(-2, 2, 40), torch.zeros(40), 0.1, 0.3, True)


@pytest.mark.parametrize("row", [row for row in rows("with_writes") if row.name not in WITHOUT_A_CPU], ids=lambda row: row.name)
def test_the_form_with_writes_returns_results_and_what_is_written(row):
    (op,), form = overloads(row.name), calls.resolve(row.with_writes.name)
    assert not form._schema.is_mutable
    torch.manual_seed(0)
    expected = form(*_written_arguments(row))
    args = _written_arguments(row)
    torch.manual_seed(0)
    out = op(*args)
    own = (out if isinstance(out, tuple) else (out,)) if row.with_writes.own else ()
    got = [*own, *(args[place] for place in calls.written_positions(op, args))]
    assert [torch.equal(one, two) for one, two in zip(got, expected, strict=True)] == [True] * len(expected)
    assert len(own) == row.with_writes.own


@pytest.mark.parametrize("row", rows("in_memory_order"), ids=lambda row: row.name)
def test_what_draws_in_memory_order_gives_a_transposed_tensor_other_numbers(row):
    (op,), form = overloads(row.name), calls.resolve(row.functional)
    flat = torch.zeros(8, 9)
    torch.manual_seed(0)
    expected = form(flat.t(), 0.5)
    torch.manual_seed(0)
    op(flat.t(), 0.5)
    assert not torch.equal(flat.t(), expected), "they agree by now: the column can go"


@pytest.mark.parametrize("row", rows("complex_in_place"), ids=lambda row: row.name)
def test_complex_numbers_round_otherwise_in_place(row):
    (op,), form = overloads(row.name), calls.functional_form(*overloads(row.name))
    one, two = torch.randn(999, dtype=torch.complex64), torch.randn(999, dtype=torch.complex64)
    left = op(one.clone(), two)
    assert torch.equal(calls.resolve(row.complex_in_place)(one, two), left)
    assert not torch.equal(form(one, two), left), "they agree by now: the row can go"


@pytest.mark.parametrize("row", rows("elementwise"), ids=lambda row: row.name)
def test_what_is_called_element_wise_lacks_the_tag_and_works_in_place(row):
    (op,), (args,) = overloads(row.name), CALLS[row.name]
    assert torch.Tag.pointwise not in op.tags, "torch says so by now: the column can go"
    out = calls.resolve(calls.out_form(op))
    expected = op(*args)
    for place in (at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)):
        given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        out(*given, grad_input=given[place])
        assert torch.equal(given[place], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("row", rows("rounds_once"), ids=lambda row: row.name)
def test_what_rounds_once_gives_the_same_bits_into_any_layout(row, dtype):
    (op,) = overloads(row.name)
    out = calls.resolve(calls.out_form(op))
    one, two = (torch.randn(37, 41, dtype=torch.float64).exp().to(dtype) for _ in range(2))
    expected = op(one, two)
    for target in (torch.empty(41, 37).t(), torch.empty(37, 50)[:, 3:44], torch.empty(37, 82)[:, ::2], torch.empty(41, 74).t()[::2]):
        assert torch.equal(out(one, two, out=torch.empty_strided(target.shape, target.stride(), dtype=dtype)), expected)


ON_A_GPU = {"aten._use_cudnn_ctc_loss.Tensor", "aten._use_miopen_ctc_loss.Tensor"}  # asked there alone: tests/gpu/test_calls_on_cuda.py


@pytest.mark.parametrize("row", [row for row in rows("answers_without_data") if row.name not in ON_A_GPU], ids=lambda row: row.name)
def test_what_answers_without_data_reads_it(row):
    (op,), (args, others) = overloads(row.name), CALLS[row.name]
    assert op(*args) != op(*others)


@pytest.mark.parametrize("row", [row for row in rows("shaped_by") if row.name not in ON_A_GPU], ids=lambda row: row.name)
def test_shapes_follow_from_the_data_of_these_arguments_alone(row):
    (op,), (args, *others) = overloads(row.name), CALLS[row.name]

    def shapes(given):
        out = op(*given)
        return [part.shape for part in (out if isinstance(out, tuple) else (out,))]

    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and place not in row.shaped_by:
            other = nan_like(arg) if arg.is_floating_point() else arg.flip(-1)
            assert shapes([*args[:place], other, *args[place + 1 :]]) == shapes(args)
    assert bool(others) == bool(row.shaped_by)
    assert all(shapes(other) != shapes(args) for other in others)


@pytest.mark.parametrize("row", rows("split"), ids=lambda row: row.name)
def test_a_split_makes_groups_of_all_results(row):
    for op in overloads(row.name)[:1]:
        arguments = op._schema.arguments
        assert arguments[row.split.mask].name == "output_mask"
        assert sorted(index for group in row.split.groups for index in group) == list(range(len(op._schema.returns)))


@pytest.mark.parametrize("row", rows("reads_result"), ids=lambda row: row.name)
def test_parameters_left_out_are_those_of_the_schema(row):
    """`tests/rewrite/test_read_results.py` holds the bits."""
    forward = calls.resolve(row.reads_result.forward)._schema.arguments
    assert tuple(argument.default_value for argument in forward[1:]) == row.reads_result.defaults


@pytest.mark.parametrize("row", rows("unread"), ids=lambda row: row.name)
def test_what_is_not_read_does_not_matter(row):
    """With other contents of these arguments the results are the same, to the last bit."""
    namespace, base, *overload = row.name.split(".")
    packet = getattr(getattr(torch.ops, namespace), base)
    for args in CALLS[row.name]:
        op = getattr(packet, *overload) if overload else packet
        found = []
        for change in (torch.clone, nan_like):
            torch.manual_seed(0)
            found.append(op(*(change(arg) if at in row.unread else arg for at, arg in enumerate(args))))
        assert torch.equal(*found)


@pytest.mark.parametrize("row", rows("untouched"), ids=lambda row: row.name)
def test_what_is_untouched_holds_anything(row, monkeypatch):
    """Torch fills such memory with what is not a number, where it is asked to be deterministic."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        for args in CALLS[row.name]:
            assert getattr(torch.ops.aten, row.name.removeprefix("aten."))(*args).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["aten.addmm_.default", "aten.relu_.default", "aten.uniform_.default", "aten.__ior__.Tensor"])
def test_the_in_place_form_has_the_row_of_its_functional_form(name):
    assert writes_in_place(name)
    assert replace(row_of(name), name="") == replace(row_of(f"{functional_base(name)}.default"), name="")


def test_in_place_forms_are_known_by_name():
    """By torch's own tag; names that end so without writing are none."""
    wrong = [
        calls.name_of(op)
        for _, op in dispatched()
        if torch.Tag.inplace in op.tags and not writes_in_place(calls.name_of(op)) and op._schema.is_mutable
    ]
    assert wrong == []


def test_linear_algebra_is_known_by_name_and_activations_are_none():
    assert row_of("aten.linalg_cholesky_ex.default").factorises
    assert row_of("aten.lu_unpack.default").factorises
    assert not row_of("aten.gelu_backward.default").factorises


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.by_tensor], ids=lambda row: row.name)
def test_tensors_stand_for_numbers_with_the_same_bits(row, dtype):
    """Of a list only single elements: what is longer may be multiplied by the inverse of a number."""
    op, by_tensor = (calls.resolve(name) for name in (row.name, f"{row.name.rpartition('.')[0]}.{row.by_tensor}"))
    lists, writes = "_foreach" in row.name, row.name.endswith("out")
    for seed in range(200):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(1 if lists else 37, generator=rng, dtype=torch.float64).to(dtype)
        number = float(torch.randn((), generator=rng, dtype=torch.float64)) * 10.0 ** (seed % 9 - 6)
        more = {"out": torch.empty_like(x)} if writes else {}
        given = [x] if lists else x
        results = [
            each(given, by, **{key: value.clone() for key, value in more.items()})
            for each, by in ((op, number), (by_tensor, torch.tensor(number, dtype=dtype)))
        ]
        one, other = (result[0] if lists else result for result in results)
        assert torch.equal(one, other)


def test_facts_about_operators_are_nowhere_but_in_the_table():
    """Sets and tables keyed by operators of aten, in any other file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "ir" / "operators"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keys = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Set) else []
            found += [f"{path.name}:{node.lineno}" for key in keys if isinstance(key, ast.Constant) and str(key.value).startswith("aten.")]
    assert found == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmaxes_leave_their_results_where_arguments_lie(name, dtype):
    """Bit for bit, along every dimension, with infinities and what is no number among the elements."""
    forward, backward = (calls.resolve(f"aten.{each}.default") for each in (name, f"{name}_backward_data"))
    for shape in ((7, 13), (3, 4, 5), (2, 3, 17, 33), (5, 1), (1, 5003), (3, 0)):
        for dim in range(len(shape)):
            x, grad = ((torch.randn(shape, dtype=torch.float64) * 4).to(dtype) for _ in range(2))
            x.view(-1)[3:12:4] = torch.tensor([torch.inf, torch.nan, -torch.inf], dtype=dtype)[: len(x.view(-1)[3:12:4])]
            y = forward(x, dim, False)
            given = x.clone()
            calls.resolve(calls.out_form(forward))(given, dim, False, out=given)
            assert same_bits(given, y)
            left = backward(grad, y, dim, dtype)
            for place in (0, 1):
                args = [grad.clone(), y.clone()]
                keyword = {"grad_input" if name == "_softmax" else "out": args[place]}
                calls.resolve(calls.out_form(backward))(*args, dim, dtype, **keyword)
                assert same_bits(args[place], left)
