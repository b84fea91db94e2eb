import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.base.solver_text import described
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, ReadyList, Repair, ReversePostOrder, Solver
from tests.problems import Case, cases, slow_peak, unhurried

SOLVERS = [ProgramOrder(), ReversePostOrder("inputs"), ReversePostOrder("outputs"), ReadyList("index"), ReadyList("waiting")]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@unhurried
@given(case=cases(max_nodes=12))
def test_orders_are_topological_and_their_peaks_true(solver: Solver, case: Case) -> None:
    found = solver.solve(case.problem)
    assert sorted(found.order) == list(range(len(case.tasks)))
    assert all(case.preds(node) <= set(found.order[:step]) for step, node in enumerate(found.order))
    assert found.peak_bytes == slow_peak(case, found.order)
    assert found.lower_bound_bytes <= found.peak_bytes
    assert found.solver == described(solver)
    assert solver.solve(case.problem) == found


@unhurried
@given(cases(max_nodes=12))
def test_program_order_is_as_written_where_that_is_right(case: Case) -> None:
    written = tuple(range(len(case.tasks)))
    right = all(case.preds(node) <= set(range(node)) for node in written)
    assert (ProgramOrder().solve(case.problem).order == written) == right


@unhurried
@given(cases(max_nodes=12))
def test_reverse_post_orders_by_recursion(case: Case) -> None:
    nodes = range(len(case.tasks))
    preds = {node: sorted(case.preds(node)) for node in nodes}
    succs = {node: [other for other in nodes if node in preds[other]] for node in nodes}
    from_inputs = _finished(succs, [node for node in nodes if not preds[node]])
    from_outputs = _finished(preds, [node for node in nodes if not succs[node]])
    assert ReversePostOrder("inputs").solve(case.problem).order == tuple(reversed(from_inputs))
    assert ReversePostOrder("outputs").solve(case.problem).order == tuple(from_outputs)


@unhurried
@given(cases(max_nodes=12), st.sampled_from(["index", "waiting"]))
def test_the_ready_list_is_its_rule(case: Case, oldest: str) -> None:
    order: list[int] = []
    ready: list[int] = []  # the longest ready first
    while len(order) < len(case.tasks):
        newly = [node for node in range(len(case.tasks)) if node not in (*order, *ready) and case.preds(node) <= set(order)]
        ready += newly
        age = ready.index if oldest == "waiting" else int
        chosen = min(ready, key=lambda node: (*_added_and_needed(case, order, node), age(node)))
        ready.remove(chosen)
        order.append(chosen)
    assert ReadyList(oldest).solve(case.problem).order == tuple(order)


def test_deep_and_wide_problems_need_no_recursion() -> None:
    chain = [Task("c", makes=(node,), reads=(node - 1,) if node else ()) for node in range(100_000)]
    deep = OrderProblem.of([8] * 100_000, chain)
    assert [solver.solve(deep).peak_bytes for solver in SOLVERS] == [16] * len(SOLVERS)
    wide = OrderProblem.of([8] * 100_000, [Task("w", reads=(node,)) for node in range(100_000)])
    assert ReadyList().solve(wide).order == tuple(range(100_000))


@pytest.mark.parametrize("make", [lambda: ReversePostOrder("output"), lambda: ReadyList("age")])  # type: ignore[arg-type]
def test_unknown_settings_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"expected one of '.*', '.*', got '.*'"):
        make()  # type: ignore[operator]


def _finished(adjacent: dict[int, list[int]], roots: list[int]) -> list[int]:
    order: list[int] = []
    seen: set[int] = set()

    def visit(node: int) -> None:
        if node in seen:
            return
        seen.add(node)
        for other in adjacent[node]:
            visit(other)
        order.append(node)

    for root in roots:
        visit(root)
    return order


def _added_and_needed(case: Case, done: list[int], node: int) -> tuple[int, int]:
    task = case.tasks[node]
    dying = [tensor for tensor in task.reads if tensor not in case.kept and case.readers(tensor) <= {*done, node}]
    lasting = [tensor for tensor in task.makes if tensor in case.kept or case.readers(tensor)]
    added = sum(case.tensor_bytes[tensor] for tensor in lasting) - sum(case.tensor_bytes[tensor] for tensor in dying)
    needed = sum(case.tensor_bytes[tensor] for tensor in task.makes) + task.workspace_bytes
    if any(tensor in dying for tensor, _ in task.takes):
        needed -= case.tensor_bytes[task.makes[0]]
    return added, needed


def test_a_solver_is_described_by_what_is_not_its_default() -> None:
    assert described(ReadyList()) == "ReadyList()"
    assert described(ReadyList("waiting")) == "ReadyList(oldest='waiting')"
    nested = Repair(inner=ReadyList("waiting"), first=ProgramOrder())
    assert described(nested) == "Repair(inner=ReadyList(oldest='waiting'), first=ProgramOrder())"
