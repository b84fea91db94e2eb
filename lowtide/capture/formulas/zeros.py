"""Views of zeros without memory, as forward derivatives have them: ATen makes some of them beneath dispatch modes.

What it makes then is no fake, and lies on the meta device. Without the key that tells such zeros, a view is one as any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import formula

_ZEROS = torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)


@formula(torch.ops.aten.view.default, torch.ops.aten.as_strided.default)
def _view(op: OpOverload, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_ZEROS):
        return op(given, *args, **kwargs)  # type: ignore[no-any-return]
