"""Every rule against torch: of the shapes that real operators give, none says anything, since all that it would say holds already."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ir.graph import Arg, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import functional_base
from research.shapes.relations import RULES, equations
from research.shapes.solve import ShapeGraph

NOTHING = ShapeGraph((), {}, ())


class Recorder(TorchDispatchMode):
    """Notes each operator's call with the shapes of its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else (out,)
        outputs = tuple(self.value(each) if isinstance(each, torch.Tensor) else None for each in made)
        self.nodes.append(Node(str(func), tuple(map(self.arg, args)), outputs))
        return out

    def arg(self, arg: object) -> Arg:
        if isinstance(arg, (tuple, list)):
            return tuple(map(self.arg, arg))
        return self.value(arg) if isinstance(arg, torch.Tensor) else arg if isinstance(arg, (int, float)) else None

    def value(self, tensor: torch.Tensor) -> Value:
        name = f"v{len(self.nodes)}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Value(name, Storage(name, tensor.nbytes, "cpu", Kind.ACTIVATION), dtype, tuple(tensor.shape), tuple(tensor.stride()))


def step() -> None:
    """Layers of today's networks, forward and backward, on sizes that all differ; broadcasting, and extents of 1."""
    words = torch.randint(0, 11, (2, 3))
    table, weight, wide = torch.randn(11, 10, requires_grad=True), torch.randn(10, 30, requires_grad=True), torch.randn(7, 10)
    x = F.embedding(words, table)
    query, key, value = (x @ weight).reshape(2, 3, 3, 2, 5).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(query, key[:, :, :2], value[:, :, :2], dropout_p=0.0)
    h = attended.transpose(1, 2).reshape(2, 3, 10)
    h = F.layer_norm(h + x, (10,)) * torch.ones(1, 3, 1)
    h = torch.cat([F.gelu(h), F.silu(h), torch.tanh(h)], dim=-1)
    scores = torch.softmax(h.flatten(0, 1).unsqueeze(0) @ torch.randn(1, 30, 11), -1).squeeze(0)
    scores = torch.where(scores > 0.5, scores, scores.clone().clamp(0.1).maximum(torch.zeros(11)))
    scores = torch.addmm(torch.zeros(11), scores, torch.eye(11)) + torch.baddbmm(torch.zeros(1), scores[None], torch.eye(11)[None])[0]
    other = (
        F.relu(F.linear(wide, torch.randn(4, 10), torch.randn(4)).t()).expand(3, 4, 7).bmm(torch.randn(3, 7, 2)).sum()
        + wide.view(torch.int32).sum()
    )
    other = other + wide.view(torch.int32).sum()
    image = F.batch_norm(torch.randn(2, 3, 4, 5).to(torch.float64), None, None, training=True)
    loss = F.cross_entropy(F.dropout(scores, 0.2).log().masked_fill(scores < 0, 0.0), words.flatten())
    (loss + other + torch.sigmoid(image).sum()).backward()
    state = (
        torch.zeros_like(table)
        .copy_(table.detach())
        .mul_(0.9)
        .addcmul_(table.grad, table.grad)
        .addcdiv_(table.grad, table.detach().square() + 1)
    )
    state.sqrt().add_(1.0).lerp_(torch.zeros(11, 10), 0.1).zero_()


def recorded() -> list[Node]:
    torch.manual_seed(0)
    with Recorder() as recorder:
        step()
    return recorder.nodes


def test_no_rule_says_anything_of_real_shapes():
    nodes = recorded()
    assert list(equations(Graph((), tuple(nodes), ()), NOTHING)) == []
    ruled = {functional_base(node.op) for node in nodes} & RULES.keys()
    assert len(ruled) >= 30, sorted(RULES.keys() - ruled)


def test_every_rule_that_was_asked_says_something_of_other_shapes():
    """With extents that fit nothing, and where a broadcast says anything at all, each rule finds the contradiction."""
    silent = set()
    for node in recorded():
        if functional_base(node.op) not in RULES or not node.outputs or node.outputs[0] is None or not node.outputs[0].shape:
            continue
        wrong = replace(node.outputs[0], shape=tuple(extent + 1000 for extent in node.outputs[0].shape))
        given = [value for value in node.inputs if any(extent > 1 for extent in value.shape)]
        if given and not list(equations(Graph((), (replace(node, outputs=(wrong,)),), ()), NOTHING)):
            silent.add(node.op)
    assert silent <= {"aten.view.dtype"}
