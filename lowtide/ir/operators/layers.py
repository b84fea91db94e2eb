"""Rows of norms and activations, and of operators about which torch's fake kernels or tags err."""

from __future__ import annotations

from lowtide.ir.operators.row import Fake, Operator, ReadsResult, Statistics, WithWrites

_RUNNING = (3, 4)  # mean and variance

_NORMS = (
    Operator(
        name="aten.native_batch_norm.default",
        statistics=Statistics(_RUNNING, flag=5, optional=True),
        with_writes=WithWrites("aten._native_batch_norm_legit_functional.default", own=3),
        fake=Fake.STATISTICS_TYPE,
    ),
    Operator(name="aten.cudnn_batch_norm.default", statistics=Statistics(_RUNNING, flag=5)),
    Operator(name="aten.miopen_batch_norm.default", statistics=Statistics(_RUNNING, flag=5)),
    Operator(name="aten._batch_norm_impl_index.default", statistics=Statistics(_RUNNING, flag=5)),
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

_ASKING_DATA = (
    Operator(name="aten.linalg_lstsq.default", fake=Fake.ASKS_DATA_FOR_SHAPES),
    Operator(name="aten.multilabel_margin_loss_forward.default", fake=Fake.LOSS_OF_ONE),
    Operator(name="aten._nested_tensor_from_mask_left_aligned.default", answers_without_data=True),
    Operator(name="aten.masked_select.default", shaped_by=(1,)),
    Operator(name="aten._ctc_loss.default", shaped_by=()),
    Operator(name="aten._ctc_loss.Tensor", shaped_by=(2, 3)),
    Operator(name="aten._pack_padded_sequence.default", shaped_by=(1,)),
)

ROWS = (*_NORMS, *_ACTIVATIONS, *_ASKING_DATA)
