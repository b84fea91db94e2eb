"""One program both ways: eagerly and by lowtide from the same seed, and what became of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

import lowtide
from bench.bits import same_bits

_PLACE = re.compile(r"\S+\.py:\d+(, called at \S+)?")


class Verdict(NamedTuple):
    """right, refused, different, raised; "not in eager" where eager raises or does not repeat itself."""

    what: str
    why: str = ""


def verdict(eager: Callable[[], Any], ours: Callable[[], Any]) -> Verdict:
    """Both must start from the same; each gives all that is compared, in a nested structure."""
    try:
        expected, again = eager(), eager()
    except Exception as error:  # whatever it is: it is eager's
        return Verdict("not in eager", type(error).__name__)
    if not alike(expected, again):
        return Verdict("not in eager", "eager differs from itself")
    try:
        found = ours()
    except lowtide.LowtideError as error:
        return Verdict("refused", brief(error))
    except Exception as error:
        return Verdict("raised", f"{type(error).__name__}: {brief(error)}")
    if alike(expected, found):
        return Verdict("right")
    if not all(alike(expected, eager()) for _ in range(30)):  # some kernels give other bits at other addresses
        return Verdict("not in eager", "eager differs from itself")
    return Verdict("different")


def alike(one: Any, two: Any) -> bool:
    """Whether two nested structures hold the same bits; any NaN equals any other."""
    ones, twos = tree_leaves(one), tree_leaves(two)
    return len(ones) == len(twos) and all(map(_same, ones, twos))


def brief(error: Exception) -> str:
    """A message without places, so that equal reasons are equal lines."""
    return _PLACE.sub("...", " ".join(str(error).split()))[:300]


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(two) and repr(one) == repr(two)
    if not isinstance(two, torch.Tensor) or one.layout is not two.layout:
        return False
    if one.layout is not torch.strided or one.is_quantized:
        return bool(repr(one) == repr(two))
    one, two = (each.detach().resolve_conj().resolve_neg() for each in (one, two))
    if same_bits(one, two):
        return True
    if one.dtype != two.dtype or one.shape != two.shape or not (one.dtype.is_floating_point or one.dtype.is_complex):
        return False
    parts = (torch.view_as_real(each).clone() if each.is_complex() else each.clone() for each in (one, two))
    return same_bits(*(torch.where(part.isnan(), torch.full_like(part, float("nan")), part) for part in parts))
