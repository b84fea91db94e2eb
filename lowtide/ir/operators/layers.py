"""Rows of norms, activations and plain arithmetic, and of operators about which torch's fake kernels or tags err."""

from __future__ import annotations

from lowtide.ir.operators.row import Fake, Operator, ReadsResult, Statistics, WithWrites

_RUNNING = (3, 4)  # mean and variance
_WITH_FLAG = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index")
_GATHERING = ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")

_NORMS = (
    Operator(
        name="aten.native_batch_norm.default",
        statistics=Statistics(_RUNNING, flag=5, optional=True),
        with_writes=WithWrites("aten._native_batch_norm_legit_functional.default", own=3),
        fake=Fake.STATISTICS_TYPE,
    ),
    *(Operator(name=f"aten.{name}", statistics=Statistics(_RUNNING, flag=5)) for name in _WITH_FLAG),
    *(Operator(name=f"aten.{name}", statistics=Statistics(_RUNNING, flag=None)) for name in _GATHERING),
    Operator(name="aten.batch_norm_update_stats", statistics=Statistics((1, 2), flag=None)),
)

_ACTIVATIONS = (
    # x <= a or x >= b, and min(max(x, a), b) <= a or >= b, are the same question
    Operator(
        name="aten.hardtanh_backward.default", elementwise=True, reads_result=ReadsResult("aten.hardtanh.default", (-1, 1), bounds=True)
    ),
    # x > 0, and (x if x > 0 else s * x) > 0, are the same question if s > 0
    Operator(
        name="aten.leaky_relu_backward.default", elementwise=True, reads_result=ReadsResult("aten.leaky_relu.default", (0.01,), rising=0)
    ),
    Operator(name="aten.elu_backward.default", elementwise=True),
    Operator(name="aten.softplus_backward.default", elementwise=True),
    Operator(name="aten.div_.Tensor", complex_in_place="lowtide.divided.default"),
)

# Their kernels on a CPU write an element once they have read all that they need of it: the result may lie where an argument does.
_SOFTMAXES = tuple(
    Operator(name=f"aten.{name}", in_memory_of=f"aten.{name}.out")
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
)

# One rounding of the exact result, as IEEE 754 wants it of scalar and vector instructions alike.
_ARITHMETIC = tuple(Operator(name=f"aten.{name}.Tensor", rounds_once=True) for name in ("add", "sub", "mul", "div"))

_REDUCED = tuple(
    Operator(name=f"aten.{name}.default", fake=Fake.KEEPS_ELEMENTS)
    for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
)

_ASKING_DATA = (
    Operator(name="aten.linalg_lstsq.default", fake=Fake.ASKS_DATA_FOR_SHAPES),
    Operator(name="aten._transformer_encoder_layer_fwd.default", fake=Fake.MISSING),
    Operator(name="aten.multilabel_margin_loss_forward.default", fake=Fake.LOSS_OF_ONE),
    Operator(name="aten._nested_tensor_from_mask_left_aligned.default", answers_without_data=True),
    Operator(name="aten.masked_select.default", shaped_by=(1,)),
    Operator(name="aten._ctc_loss.default", shaped_by=()),
    Operator(name="aten._ctc_loss.Tensor", shaped_by=(2, 3)),
    Operator(name="aten._pack_padded_sequence.default", shaped_by=(1,)),
)

ROWS = (*_NORMS, *_ACTIVATIONS, *_SOFTMAXES, *_ARITHMETIC, *_REDUCED, *_ASKING_DATA)
