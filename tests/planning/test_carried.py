"""What is searched for one program serves its sibling: every sequence carried over is right, and keeps the peak that it had."""

from dataclasses import replace

import numpy as np

from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.sweep import Sweep
from tests.graphs import array, compute, write
from tests.planning.networks import REQUEST, network


def _training(makes_state: bool) -> Candidate:
    """The network with an update of its state at the end, which the first step makes, too."""
    base = network()
    state = array(Storage("state", 96, "cpu", Kind.STATE))
    parameter = array(Storage("p", 32, "cpu", Kind.PARAMETER))
    nodes = [*base.nodes]
    first = compute("a_first", base.inputs[0], parameter, nbytes=32)  # repeated only as long as the parameter is what it was
    nodes.insert(0, first)
    gradient = nodes[-1].results[0]
    if makes_state:
        nodes.append(compute("state", nbytes=96))
        state = nodes[-1].results[0]
    nodes.append(compute("update", state, gradient, first.results[0], nbytes=32))
    nodes.append(write(parameter, nodes[-1].results[0]))
    inputs = (*base.inputs, parameter, *(() if makes_state else (state,)))
    outputs = (nodes[-1].writes[0][1], *((state,) if makes_state else ()))
    graph = Graph(inputs, tuple(nodes), outputs)
    return Candidate(graph, (0,) * len(nodes), (1.0,) * len(nodes))


def test_sequences_carried_over_are_right_and_no_higher():
    later, first = _training(False), _training(True)
    main = CandidateArchive.bare([later], REQUEST).by(REQUEST.sweeps)
    other = main.carried_to(CandidateArchive.bare([first], REQUEST))
    assert not other.done
    assert len(other.archive.points) > 3
    for point in other.archive.points:
        assert first_wrong(other.problems[0], point.sequence) == -1
        assert cost_of(other.problems[0], point.sequence).peak_bytes == point.peak_bytes
        assert set(np.unique(point.sequence)) == set(range(len(first.graph.nodes))), "no node is missing"
    for point in main.archive.points:
        assert other.archive.within(point.peak_bytes) is not None, "the state is made late: the first step fits wherever later ones do"


def test_all_programs_are_planned_from_one_search(monkeypatch):
    searches, explore = [], Sweep.explore
    monkeypatch.setattr(Sweep, "explore", lambda *args, **settings: searches.append(args) or explore(*args, **settings))
    planner = Planner([[_training(True)], [_training(False)]])
    top = planner.plans(REQUEST)[-1]
    limits = range(top.peak_bytes, top.resident_bytes + (top.peak_bytes - top.resident_bytes) * 2 // 3, -64)
    found = [planner.plans(replace(REQUEST, budget=Budget(limit))) for limit in limits]
    assert len(searches) == 1
    assert all(plan.peak_bytes <= limit for plans, limit in zip(found, limits, strict=True) for plan in plans)
    assert all(plans[0].cost_report.recomputed for plans in found[-1:])
