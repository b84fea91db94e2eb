"""What a node does, by its operator's name alone: draws random numbers, gives views, copies to the host, can be repeated.

No torch is asked.

The table of random operators is held to torch's own tags by a test.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Graph, Node

# Functions of Python's `math` that arithmetic on numbers may call, as "py.math_sqrt".
MATH_FUNCTIONS = frozenset({
    "atan", "ceil", "cos", "exp", "expm1", "fabs", "floor", "log", "log10", "log1p", "log2", "pow", "sin", "sqrt", "tan", "tanh",
})  # fmt: skip

# Operators that are lowtide's own: copies to the host's memory and back, see `graph`.
STORE, DROP, LOAD = "host.store", "host.drop", "host.load"

# Ends the program if its first argument, a number, is not zero; its further arguments are what the program returns.
STOP = "py.stop_if"

# Operators of aten that draw from the generator, by their names without the overload.
RANDOM = frozenset({
    "_cudnn_attention_forward", "_cudnn_init_dropout_state", "_cudnn_rnn", "_efficient_attention_forward", "_fill_mem_eff_dropout_mask",
    "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_fused_dropout", "_fused_sdp_choice", "_lstm_mps",
    "_nested_tensor_softmax_with_shape", "_sample_dirichlet", "_scaled_dot_product_fused_attention_overrideable", "_standard_gamma",
    "_triton_scaled_dot_attention", "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "exponential",
    "feature_alpha_dropout", "feature_dropout", "geometric", "gru", "log_normal", "lstm", "miopen_rnn", "multinomial", "native_dropout",
    "normal", "normal_functional", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm",
    "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise", "rrelu_with_noise_functional", "uniform",
})  # fmt: skip

# Operators that draw only if a probability is not zero: where it stands.
DROPOUT_POSITION = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_attention_math": 4,
    "_scaled_dot_product_attention_math_for_mps": 4,
    "scaled_dot_product_attention": 4,
}

# The backward passes of attention carry the tag of their forward ones: they are given its random state and draw nothing new.
REDRAWING = frozenset({
    "_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_efficient_attention_backward",
})  # fmt: skip

# Operators that update statistics on the side, and compute the same results without: positions of the statistics.
_STATISTICS = {"aten.native_batch_norm.default": (3, 4)}


# A library's operator and its overload, or arithmetic on Python numbers: nothing that Python could look up by such a name.
_OPERATOR = re.compile(r"(?!py\.|host\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}|py\.[a-z_]+", re.ASCII)


def check_operators(graph: Graph) -> None:
    """Whether every operator of a graph has a name that an operator can have. Raises FormatError naming the node."""
    pending = [graph]
    while pending:
        for index, node in enumerate(pending.pop().nodes):
            for name in (node.op, *(overload for _, overload in node.inplace)):
                if not _OPERATOR.fullmatch(name) and name not in (STORE, DROP, LOAD):
                    raise FormatError(f"node {index}: expected the name of an operator such as 'aten.add.Tensor', got {name!r}")
            if node.body is not None:
                pending.append(node.body)


def is_random(node: Node) -> bool:
    """Whether a node draws from the generator."""
    namespace, base, _ = node.op.split(".") if node.op.count(".") == 2 else ("py", "", "")
    if namespace != "aten":
        return namespace not in ("py", "lowtide")  # of somebody else's operators nothing is known
    base = base.rstrip("_")
    if base in DROPOUT_POSITION:
        return _probability(node, DROPOUT_POSITION[base]) != 0
    return base in RANDOM


def is_transfer(node: Node) -> bool:
    """Whether a node begins, ends or needs a copy in the host's memory."""
    return node.op in (STORE, DROP, LOAD)


def is_view(node: Node) -> bool:
    """Whether a node only looks at the storages of its inputs in other ways: it makes no bytes and writes none."""
    results = [value for value in node.outputs if value is not None]
    given = {value.storage for value in node.inputs}
    return bool(results) and not node.writes and all(value.storage in given and value.dtype != "scalar" for value in results)


def repeatable(node: Node) -> Node | None:
    """A node that computes the same results once more and does nothing else; None where there is none.

    An operator that is random, that writes or that copies to the host or back cannot be repeated; batch normalisation can, without the
    update of its statistics.
    """
    if node.body is not None or is_random(node) or is_transfer(node) or not any(value is not None for value in node.outputs):
        return None
    if not node.writes:
        return node
    places = _STATISTICS.get(node.op, ())
    if {before for before, _ in node.writes} - {arg for place in places for arg in (node.args[place],)}:
        return None
    args = tuple(None if place in places else arg for place, arg in enumerate(node.args))
    return replace(node, args=args, writes=())


def _probability(node: Node, position: int) -> Arg:
    given = dict(node.kwargs).get("dropout_p", 0.0)
    return node.args[position] if position < len(node.args) else given
