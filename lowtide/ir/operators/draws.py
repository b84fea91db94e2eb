"""Rows of what draws random numbers, attention aside."""

from __future__ import annotations

from lowtide.ir.operators.row import Draws, Operator, WithWrites

# Random where they run, and nothing else is known of them.
_PLAIN = (
    "_cudnn_init_dropout_state", "_cudnn_rnn", "_fused_dropout", "_lstm_mps", "_nested_tensor_softmax_with_shape", "_sample_dirichlet",
    "_standard_gamma", "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "feature_alpha_dropout", "feature_dropout",
    "geometric", "gru", "log_normal", "lstm", "miopen_rnn", "multinomial", "native_dropout", "normal", "poisson", "rand", "randint",
    "randn", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise", "rrelu_with_noise_functional",
)  # fmt: skip

# What they are given says how much to draw.
_OVERWRITING = ("exponential", "normal_functional", "rand_like", "randint_like", "randn_like", "random", "uniform")

_NOISE = "aten.rrelu_with_noise_functional.default"

ROWS = (
    *(Operator(name=f"aten.{name}", draws=Draws.ALWAYS) for name in _PLAIN),
    *(Operator(name=f"aten.{name}", draws=Draws.ALWAYS, unread=(0,)) for name in _OVERWRITING),
    Operator(name="lowtide.truncated_normal", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli_", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli.p", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli.Tensor", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli_.float", draws=Draws.ALWAYS, unread=(0,), in_memory_order=True, functional="aten.bernoulli.p"),
    Operator(name="aten.normal_.default", draws=Draws.ALWAYS, unread=(0,), functional="aten.normal_functional.default"),
    Operator(name="aten.rrelu_with_noise.default", draws=Draws.ALWAYS, with_writes=WithWrites(_NOISE, own=1)),
    Operator(name="aten.rrelu_with_noise_.default", draws=Draws.ALWAYS, with_writes=WithWrites(_NOISE, own=0)),
)
