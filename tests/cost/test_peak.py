import pytest

from lowtide.cost.peak import LiveTensor, memory_profile, peak_tensors
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value


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


def test_the_tensors_at_the_peak(graph: Graph) -> None:
    assert peak_tensors(graph, (0, 1, 2), (6, 0, 0)) == (
        LiveTensor("x", 9, Kind.INPUT, "", None, 0, 3),
        LiveTensor("a", 8, Kind.ACTIVATION, "aten.mm.default", Source("net.py", 12, "layer1.0"), 0, 1),
        LiveTensor("w", 5, Kind.PARAMETER, "", None, 0, 3),
    )


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
    assert (profile.peak_bytes, profile.peak_step, profile.at(profile.peak_step)) == (0, -1, ())
