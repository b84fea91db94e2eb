import pytest

from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.plan.snapshot import LiveTensor, phase_of
from tests.graphs import view, write
from tests.peaks import memory_profile


def vector(name: str, nbytes: int, kind: Kind) -> Value:
    return Value(name, Storage(name, nbytes, "cpu", kind), "uint8", (nbytes,), (1,))


@pytest.fixture
def graph() -> Graph:
    weight, lr, batch = vector("w", 5, Kind.PARAMETER), vector("lr", 0, Kind.SCALAR), vector("x", 9, Kind.INPUT)
    a, b, c = vector("a", 8, Kind.ACTIVATION), vector("b", 8, Kind.ACTIVATION), vector("c", 2, Kind.GRADIENT)
    here = Source("net.py", 12, "layer1.0")
    return Graph(
        inputs=(weight, lr, batch),
        nodes=(
            Node("aten.mm.default", (weight, batch), (a,), source=here),
            Node("aten.relu.default", (a,), (b,), inplace=((a, "aten.relu_.default"),)),
            Node("aten.sum.default", (b,), (c,)),
        ),
        outputs=(c,),
    )


def test_the_snapshot_of_the_peak(graph: Graph) -> None:
    snapshot = memory_profile(graph, (0, 1, 2), (6, 0, 0)).snapshot(graph, (0, 1, 2))
    assert snapshot is not None
    assert (snapshot.step, snapshot.steps, snapshot.op, snapshot.phase) == (0, 3, "aten.mm.default", "forward")
    assert snapshot.source == Source("net.py", 12, "layer1.0")
    assert (snapshot.footprint_bytes, snapshot.workspace_bytes) == (9 + 8 + 5 + 6, 6)
    assert snapshot.tensors == (
        LiveTensor("x", 9, Kind.INPUT, "uint8", (9,), "", None, 0, 3),
        LiveTensor("a", 8, Kind.ACTIVATION, "uint8", (8,), "aten.mm.default", Source("net.py", 12, "layer1.0"), 0, 1),
        LiveTensor("w", 5, Kind.PARAMETER, "uint8", (5,), "", None, 0, 3),
    )
    assert snapshot.by_kind == {Kind.INPUT: 9, Kind.ACTIVATION: 8, Kind.PARAMETER: 5}
    assert snapshot.by_module(Kind.ACTIVATION) == {"layer1.0": 8}
    assert snapshot.by_module(Kind.GRADIENT) == {}


@pytest.mark.parametrize(("kind", "phase"), [(Kind.ACTIVATION, "forward"), (Kind.GRADIENT, "backward"), (Kind.TEMPORARY, "optimizer")])
def test_a_step_belongs_to_a_phase_by_what_it_makes(kind: Kind, phase: str) -> None:
    weight = vector("w", 5, Kind.PARAMETER)
    assert phase_of(Node("aten.mm.default", (weight,), (vector("a", 8, kind),))) == phase


def test_a_write_belongs_to_the_phase_of_what_it_writes() -> None:
    weight, mean = vector("w", 5, Kind.PARAMETER), vector("mean", 5, Kind.BUFFER)
    assert phase_of(write(weight)) == "optimizer"
    assert phase_of(write(mean)) == "forward"
    assert phase_of(view(weight, "w_t")) == "forward"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("round_to", [1, 16])
def test_what_lives_adds_up_to_the_footprint(graph: Graph, eager: bool, round_to: int) -> None:
    profile = memory_profile(graph, (0, 1, 2), (6, 0, 1), round_to=round_to, eager=eager)
    alive = [sum(tensor.nbytes for tensor in profile.at(step)) for step in range(3)]
    assert [live + space for live, space in zip(alive, profile.workspace_bytes, strict=True)] == profile.footprint_bytes.tolist()
    assert profile.peak_bytes == max(profile.footprint_bytes)
    assert profile.resident_bytes == (14 if round_to == 1 else 32)


def test_a_profile_of_no_steps_has_nothing_at_its_peak() -> None:
    profile = memory_profile(Graph((), (), ()), ())
    assert profile.snapshot(Graph((), (), ()), ()) is None
    assert (profile.peak_bytes, profile.peak_step, profile.at(profile.peak_step)) == (0, -1, ())
