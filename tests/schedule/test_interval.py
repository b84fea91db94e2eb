import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.memory import simulate
from lowtide.schedule import ProgramOrder, ReadyList
from lowtide.schedule.repair import OrderLine
from tests.problems import Case, cases, unhurried


@unhurried
@given(cases(max_nodes=10), st.data())
def test_an_interval_costs_what_it_costs_within_the_order(case: Case, data: st.DataObject) -> None:
    line = OrderLine.of(case.problem, ReadyList().solve(case.problem).order)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(line.order))] * 2)))
    part = line.interval(first, last)
    assert ProgramOrder().solve(part).order == tuple(range(last - first))
    for inner in (np.arange(last - first), ReadyList().solve(part).order):
        whole = line.replaced(line.order, first, inner)
        expected, found = simulate(case.problem, whole), simulate(part, inner)
        assert found.footprint_bytes.tolist() == expected.footprint_bytes[first:last].tolist()
        assert found.reuses.tolist() == expected.reuses[line.order[first:last]].tolist()
