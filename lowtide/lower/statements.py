"""The lines of one node, of what dies with it, and of what is copied: what programs and the bodies of loops are made of.

Python calls an operator quickest by the method or function that torch generates for it, not through `torch.ops`. Both end in the same call
of the dispatcher, to the argument. `torch.ops` reads each argument by its type in the schema, lists of numbers worst of all: 7 us for
`aten.as_strided.default(x, [16, 64], [192, 1], 0)`, where `x.as_strided([16, 64], [192, 1], 0)` takes 3. Operators stand here by name
where that is so for all that a graph may hold; `tests/lower/test_spelling.py` holds each to torch.

Stores, drops and loads are lines, too; a program waits for what it loads.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch

from lowtide.base.messages import bytes_text
from lowtide.cost.operators import operator
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import homes_of, is_arithmetic, is_transfer, is_view, offloaded_storages
from lowtide.ir.operators.row import AS_STRIDED, DROP, ITEM, LOAD, MATH_FUNCTIONS, SAVE, SCATTER, STORE
from lowtide.ir.sizes import Size
from lowtide.plan.contents import Decision

_METHODS = {  # by overload
    "default": (
        "abs addcdiv addcdiv_ addcmul addcmul_ addmm amax amin as_strided baddbmm bmm clone copy_ cos cumsum detach erf "
        "exp exp_ expand floor gather index_select log log1p logical_and logical_not maximum mean minimum mm neg neg_ "
        "permute reciprocal reciprocal_ relu relu_ rsqrt sigmoid sigmoid_ sign sin sqrt sqrt_ sum t tanh tanh_ tril triu "
        "unsqueeze view zero_"
    ),
    "Tensor": "add add_ div div_ eq ge gt le lt mul mul_ ne sub sub_",
    "Scalar": "eq fill_ ge gt le lerp lerp_ lt masked_fill ne pow_",
    "int": "select transpose unbind",
    "dim": "mean squeeze",
    "Tensor_Scalar": "pow",
    "dim_IntList": "sum",
}
_FUNCTIONS = {
    "default": (
        "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data cat constant_pad_nd convolution "
        "embedding empty_strided full full_like native_batch_norm native_group_norm native_layer_norm ones ones_like "
        "scalar_tensor stack zeros zeros_like"
    ),
    "out": "add addcdiv addcmul div exp log maximum minimum mul neg reciprocal rsqrt sigmoid sqrt sub tanh",
    "start_step": "arange",
    "Scalar_out": "lerp",
    "Tensor_Scalar_out": "pow",
    "correction": "var_mean",
    "self": "where",
}
_TAKE_NUMBERS = {"add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_"}  # `Tensor` is called with a number, too
_MAKE = {"arange", "empty_strided", "full", "ones", "scalar_tensor", "zeros"}  # where `torch.set_default_device` says, if nothing else does
SPELLED = {
    f"{base}.{overload}": is_method
    for is_method, table in ((True, _METHODS), (False, _FUNCTIONS))
    for overload, bases in table.items()
    for base in bases.split()
}


class Offloaded(NamedTuple):
    """State that the caller lends: it stays the caller's tensor, which is emptied and filled again; and what lies on the host anyway."""

    storages: frozenset[Storage]  # of its values: the caller's own, and what loads make of it
    tensor: Mapping[Storage, Value]  # by storage on the host: the caller's tensor
    homes: frozenset[Storage]  # on the host between steps: tensors of the caller's

    @classmethod
    def of(cls, graph: Graph) -> Offloaded:
        offloaded = offloaded_storages(graph)
        stores = [node for node in graph.nodes if node.op == STORE and node.inputs[0].storage in offloaded]
        tensor = {node.results[0].storage: node.inputs[0] for node in stores}
        back = {node.results[0].storage for node in graph.nodes if node.op == LOAD and node.inputs[0].storage in tensor}
        return cls(offloaded | back, tensor, homes_of(graph))


class Arrivals(NamedTuple):
    """The loaded values that a program waits for, by position in the order."""

    before: Mapping[int, tuple[Value, ...]]  # the first node that reads what lies there
    after: Mapping[int, tuple[Value, ...]]  # the load itself, where nobody reads it: its memory may not be let go before


def swaps(plan: Decision) -> bool:
    """Whether a plan's program copies to the host."""
    return any(map(is_transfer, plan.graph.nodes))


def arrivals(plan: Decision, offloaded: Offloaded) -> Arrivals:
    """Where the program waits: as late as it can. Views read nothing. Offloaded state that nobody reads again is awaited at the end."""
    loaded: dict[Storage, tuple[int, Value]] = {}
    before: dict[int, tuple[Value, ...]] = {}
    for position, index in enumerate(plan.order):
        node = plan.graph.nodes[index]
        for value in () if is_view(node) else node.inputs:
            if value.storage in loaded:
                before[position] = (*before.get(position, ()), loaded.pop(value.storage)[1])
        if node.op == LOAD:
            loaded[node.results[0].storage] = position, node.results[0]
    unread = {position: (value,) for position, value in loaded.values() if value.storage not in offloaded.storages}
    return Arrivals(before, unread)


def transfer_statements(node: Node, names: Mapping[Value, str], offloaded: Offloaded) -> Iterator[str]:
    """The line of a store, a save, a drop or a load."""
    if node.op == LOAD:
        here, there = node.results[0], node.inputs[0]
    elif node.op == SAVE:
        here, there = node.inputs
    else:  # a drop makes no output, but a new version of the tensor that it empties
        here, there = node.inputs[0], node.results[0] if node.op == STORE else node.inputs[1]
    size, own = size_text(here.storage.nbytes), offloaded.tensor.get(there.storage)
    if there.storage in offloaded.homes:
        yield _between_steps(node, names, here, there, size)
    elif node.op == STORE:
        yield f"{names[there]} = host.store({names[here]})  # {size} to the host"
    elif node.op == DROP:
        yield f"host.drop({names[here]}, {names[there]})" if own is None else f"host.empty({names[here]}, {names[there]})  # frees {size}"
    elif own is None:
        yield f"{names[here]} = host.load({names[there]})  # {size} from the host"
    else:
        yield f"{names[here]} = host.refill({names[own]}, {names[there]})  # {size} from the host"


def _between_steps(node: Node, names: Mapping[Value, str], here: Value, there: Value, size: str) -> str:
    if node.op == LOAD:
        return f"{names[here]} = host.fetch({names[there]}, device({here.storage.device!r}))  # {size} from the host"
    if node.op == STORE:
        return f"{names[there]} = host.send({names[here]})  # {size} to the host"
    return f"host.save({names[here]}, {names[there]})  # {size} to the host" if node.op == SAVE else f"host.saved({names[here]})"


def waits(values: tuple[Value, ...], names: Mapping[Value, str]) -> Iterator[str]:
    for value in values:
        yield f"host.arrived({names[value]})"


def size_text(nbytes: Size) -> str:
    """Bytes for people, as a comment says them; of an expression all of it."""
    return bytes_text(nbytes) if isinstance(nbytes, int) else f"{nbytes} B"


def spelled(op: str, args: Sequence[Arg], given: Sequence[str]) -> str | None:
    """The text of a call, given that of its arguments; None where only `torch.ops` has the operator, or would read numbers otherwise."""
    namespace, base, overload = op.split(".")
    form = f"{base}.{overload}"
    tensors = args[: 1 if base in _TAKE_NUMBERS and overload == "Tensor" else 2] if overload in ("Tensor", "out") else ()
    if namespace != "aten" or form not in SPELLED or not all(map(_is_tensor, tensors)):
        return None  # a number where a tensor may stand would have another overload called
    if SPELLED[form]:
        return f"{given[0]}.{base}({', '.join(given[1:])})" if _is_tensor(args[0]) else None
    placed = base not in _MAKE or any(text.startswith("device=") for text in given)
    return f"torch.{base}({', '.join(given)})" if placed else None


def _is_tensor(arg: Arg) -> bool:
    return isinstance(arg, Value) and arg.dtype != "scalar"


_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_BINARY |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

_MADE = (Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY)  # by programs; as inputs they are given away

VariableNames: TypeAlias = dict[Any, str]  # the variable of each value, and of each expression among the arguments


def deaths(graph: Graph, order: Sequence[int], offloaded: Container[Storage] = ()) -> list[list[tuple[Storage, list[Value]]]]:
    """By position in the order: the storages whose last use that is, with the values on them that exist by then."""
    given_away = donated(graph)
    kept = {value.storage for value in (*graph.inputs, *graph.outputs) if value not in given_away}
    last: dict[Storage, int] = {}
    on: dict[Storage, list[Value]] = {}
    for value in given_away:
        on.setdefault(value.storage, []).append(value)
    for position, index in enumerate(order):
        node = graph.nodes[index]
        for value in (*node.inputs, *node.results):
            last[value.storage] = position
        for output in node.outputs:
            if output is not None:
                on.setdefault(output.storage, []).append(output)
    dying: list[list[tuple[Storage, list[Value]]]] = [[] for _ in order]
    for storage, position in last.items():
        if storage not in kept and storage not in offloaded:
            dying[position].append((storage, on[storage]))
    return dying


def donated(graph: Graph) -> tuple[Value, ...]:
    """The inputs that the caller gives away: nobody holds them but the program."""
    kept = {value.storage for value in graph.outputs}
    return tuple(each for each in graph.inputs if each.storage.kind in _MADE and each.storage not in kept)


def releases(dying: list[tuple[Storage, list[Value]]], names: VariableNames, node: Node, reuse: int) -> Iterator[str]:
    """The line that lets storages go: their variables are all that holds them."""
    if not dying:
        return
    variables = [names[value] for _, values in dying for value in values]
    taken = node.inplace[reuse][0].storage if reuse >= 0 else None
    freed: Size = 0
    for storage, _ in dying:
        if storage is not taken and storage.kind is not Kind.HOST:  # what is taken lives on under another name
            freed = freed + storage.nbytes
    note = f"  # frees {size_text(freed)}" if freed != 0 else ""
    yield f"del {', '.join(variables)}{note}"


def statements(node: Node, reuse: int, names: VariableNames, offloaded: Offloaded) -> Iterator[str]:
    if is_transfer(node):
        yield from transfer_statements(node, names, offloaded)
    elif is_arithmetic(node):
        yield f"{names[node.results[0]]} = {_arithmetic(node, names)}"
    elif node.op == ITEM:
        yield f"{names[node.results[0]]} = {text_of(node.args[0], names)}.item()"
    elif reuse >= 0 and node.op == SCATTER:
        yield from _scatter_in_place(node, names)
    elif reuse >= 0 and not _schema(node.inplace[reuse][1]).returns:  # over a list of one tensor
        yield _call_in_place(node, reuse, names)
        yield f"{names[node.results[0]]} = {names[node.inplace[reuse][0]]}{comment(node)}"
    else:
        expression = _call_in_place(node, reuse, names) if reuse >= 0 else call(node.op, node.args, node.kwargs, names)
        yield from _assign(node, expression, names)


def region_lines(node: Node, names: VariableNames) -> Iterator[str]:
    """The lines that have compiled kernels run a node's body: `regions` has them by the name of the first result."""
    results = "".join(f"{names[value]}, " for value in node.outputs if value is not None)
    call = f"regions[{node.results[0].name!r}]({', '.join(text_of(arg, names) for arg in node.args)})"
    yield f"{results}= {call}" if results else call


def _assign(node: Node, text: str, names: VariableNames) -> Iterator[str]:
    """Bind what a call gives. What nobody wants must not stay bound, or it would stay alive."""
    if not any(output is not None for output in node.outputs):
        yield f"{text}{comment(node)}"
        return
    targets, lists = [names[output] if output is not None else "_" for output in node.outputs], _lists(node.op)
    unwanted = "_" in targets
    if len(lists) > 1 and True in lists:  # one of several results is a list
        at, behind = lists.index(True), len(targets) - lists[::-1].index(True)
        targets[at:behind] = [f"[{', '.join(targets[at:behind])}]"]
    yield f"{', '.join(targets)}{',' if len(targets) == 1 and lists != [False] else ''} = {text}{comment(node)}"
    if unwanted:
        yield "del _"


def call(op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], names: VariableNames) -> str:
    if not _OPERATOR.fullmatch(op):
        raise FormatError(f"expected an operator's name such as 'aten.add.Tensor', got {op!r}")
    given = [text_of(arg, names) for arg in args] + [f"{_keyword(key)}={text_of(arg, names)}" for key, arg in kwargs]
    return spelled(op, args, given) or f"{_path(op)}({', '.join(given)})"


def _path(op: str) -> str:
    """An operator's name as Python reads it, which knows a word such as `from` (`aten.random.from`) as its own."""
    *before, overload = op.split(".")
    return f"getattr({'.'.join(before)}, {overload!r})" if keyword.iskeyword(overload) else op


def _call_in_place(node: Node, reuse: int, names: VariableNames) -> str:
    """The overload that works in the memory of one of its inputs."""
    value, overload = node.inplace[reuse]
    outs = [argument.name for argument in _schema(overload).arguments if argument.kwarg_only and argument.alias_info is not None]
    return call(overload, node.args, (*node.kwargs, *((name, value) for name in outs)), names)


def _scatter_in_place(node: Node, names: VariableNames) -> Iterator[str]:
    """`as_strided_scatter` has no overload that works in place: it is a copy into a view."""
    base, update, *view = node.args
    yield renamed(node, names)
    yield f"{call(AS_STRIDED, (base, *view), (), names)}.copy_({text_of(update, names)})"


def renamed(scatter: Node, names: VariableNames) -> str:
    """The memory of a scatter's base under the name of its result."""
    return f"{names[scatter.results[0]]} = {text_of(scatter.args[0], names)}{comment(scatter)}"


def _arithmetic(node: Node, names: VariableNames) -> str:
    op, operands = node.op.removeprefix("py."), [text_of(arg, names) for arg in node.args]
    if op in _BINARY:
        return f" {_BINARY[op]} ".join(operands)
    if op in ("neg", "abs"):
        return f"-{operands[0]}" if op == "neg" else f"abs({operands[0]})"
    if op in ("max", "min") or (op.startswith("math_") and op.removeprefix("math_") in MATH_FUNCTIONS):
        return f"{op.replace('math_', 'math.', 1)}({', '.join(operands)})"
    raise FormatError(f"expected arithmetic on numbers, one of {', '.join(_BINARY)}, neg, abs, max, min, math_sqrt; got {node.op!r}")


def text_of(arg: Arg, names: VariableNames) -> str:
    if isinstance(arg, Value):
        return names[arg]
    if isinstance(arg, tuple):
        return f"[{', '.join(text_of(item, names) for item in arg)}]"
    if isinstance(arg, Atom):
        return f"device({arg.name!r})" if arg.kind == "device" else f"torch.{_keyword(arg.name)}"
    if arg is None or isinstance(arg, (bool, int, float, complex, str)):
        return f"({arg!r})" if isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg < 0 else repr(arg)
    if isinstance(arg, sympy.Expr):
        return names[arg]
    raise FormatError(f"expected an argument that a program can spell, got a {type(arg).__name__}")


def _keyword(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise FormatError(f"expected an identifier, got {name!r}")
    return name


def _schema(op: str) -> torch.FunctionSchema:
    return operator(op)._schema


def _lists(op: str) -> list[bool]:
    """Of each result of an operator, whether it is a list of tensors."""
    return [isinstance(each.type, torch.ListType) for each in _schema(op).returns]


def comment(node: Node) -> str:
    """Shape and size of what a node makes, and where it comes from."""
    result = next((output for output in node.outputs if output is not None), None)
    what = f"{result.dtype}[{', '.join(map(str, result.shape))}]" if result is not None else ""
    where = f"{node.source.module}:{node.source.line}" if node.source is not None and node.source.module else ""
    text = " ".join(filter(None, (what, where)))
    return f"  # {text if text.isprintable() else ascii(text)}" if text else ""  # a module's name may hold a line's end
