"""Whether eager computes anything by other operators than a capture: every operator of torch's test database, with and without gradients
of each of its inputs, with and without autocast.

    python -m bench.formulas [--only NAME ...] [--device cpu] [--samples 8] [--kernels]

Each sample is run eagerly, and again on the same real tensors under a dispatch mode that does with operators what the recorder does:
ATen takes the same ways as under a capture, and the bits tell. As small samples may give equal bits by other operators, `--kernels`
compares by name what eager runs, as torch's profiler sees it; what lowtide computes itself differs there. Needs expecttest.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bench.torch_db.trial import alike
from lowtide.capture.formulas import as_eager
from lowtide.capture.formulas.dispatch import calls_within

MEMORY_AS_FOUND = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_QUIET = {
    "add", "alias", "as_strided", "clone", "copy", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "fill", "full",
    "full_like", "imag", "is_same_size", "item", "lift_fresh", "new_empty", "new_empty_strided", "new_full", "new_zeros", "ones",
    "ones_like", "permute", "real", "resolve_conj", "resolve_neg", "result_type", "scalar_tensor", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real", "zero",
    "zeros", "zeros_like", "_conj", "_local_scalar_dense", "_neg_view", "_reshape_alias", "_to_copy", "_unsafe_view",
}  # fmt: skip  # views and copies, which change no bits


class AsCaptured(TorchDispatchMode):
    """Runs what a program would: each operator beneath autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (within := calls_within(func, args, kwargs, tensors)) is not None:
            with self:
                return within()
        self.names.append(func._schema.name)
        with torch._C._DisableAutocast(), _looked_at("Conjugate"), _looked_at("Negative"):
            return func(*args, **kwargs)


def _looked_at(key: str) -> Any:
    """A program runs where lazy conjugates and negatives are looked at, a dispatch mode beneath."""
    return torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key), False)


def cases(info: Any, device: str, samples: int) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """What is tried of an operator: its name in words, and a call that gives results and gradients."""
    supported = info.supported_dtypes(device)
    for dtype in (each for each in (torch.float32, torch.complex64) if each in supported):
        try:
            found = list(info.sample_inputs(device, dtype, requires_grad=False))
        except Exception:  # a sample that this machine cannot make
            continue
        for number, sample in enumerate(found[:: max(1, len(found) // samples)][:samples]):
            leaves = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _trains(leaf)]
            trained = [(), tuple(range(len(leaves))), *((each,) for each in range(len(leaves)))][: 5 if info.supports_autograd else 1]
            for which, autocast in itertools.product(dict.fromkeys(trained), (False, True) if dtype is torch.float32 else (False,)):
                words = f"{dtype} sample {number}, gradients of {list(which)}{', autocast' if autocast else ''}"
                yield words, lambda sample=sample, which=which, autocast=autocast: _run(info, sample, device, which, autocast)


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _run(info: Any, sample: Any, device: str, which: tuple[int, ...], autocast: bool) -> list[Any]:
    torch.manual_seed(0)
    number, trained = itertools.count(), []

    def fresh(leaf: Any) -> Any:
        copy = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        if _trains(leaf) and next(number) in which:
            trained.append(copy.requires_grad_())
        return copy

    given, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    with torch.set_grad_enabled(bool(which)), torch.autocast(device, torch.bfloat16, enabled=autocast):
        results = [leaf for leaf in tree_leaves(info(given, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    out = [each for each in results if each.requires_grad]
    weights = [torch.linspace(-1, 1, each.numel(), device=device).reshape(each.shape).to(each.dtype) for each in out]
    gradients = torch.autograd.grad(out, trained, weights, allow_unused=True) if out else ()
    return [each if each is None else each.detach() for each in (*results, *gradients)]


def differing(info: Any, device: str = "cpu", samples: int = 8, kernels: bool = False) -> Iterator[str]:
    """What differs of an operator, in words; what eager itself does not repeat is left out."""
    for words, run in cases(info, device, samples):
        try:
            expected = run()
        except Exception:  # whatever it is: it is eager's
            continue
        with as_eager(), AsCaptured() as mode:
            found = run()
        if not alike(expected, found) and alike(expected, run()):
            yield f"{words}: other bits"
        elif kernels and (other := _other_kernels(run, mode.names, device)):
            yield f"{words}: {other}"


def _other_kernels(run: Callable[[], Any], captured: list[str], device: str) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    found: list[str] = []
    for event in profile.profiler.kineto_results.experimental_event_tree():
        _leaves(event, found, device)
    eager, ours = (Counter(_base(name) for name in names if _base(name) not in _QUIET) for names in (found, captured))
    return "" if eager == ours else f"eager runs {dict(eager - ours)}, captured is {dict(ours - eager)}"


def _base(name: str) -> str:
    return name.removeprefix("aten::").rstrip("_") if name.startswith("aten::") else "alias"


def _leaves(event: Any, found: list[str], device: str) -> None:
    """The outermost operators that are not composite; one that autocast handles calls itself."""
    again = any(child.name == event.name for child in event.children)
    if event.name.startswith("aten::") and not _composite(event.name, device) and not again:
        found.append(event.name)
        return
    for child in event.children:
        _leaves(child, found, device)


def _composite(name: str, device: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    names = [f"{name}.{each}" if each != "default" else name for each in packet.overloads()] if packet is not None else []
    has, names = torch._C._dispatch_has_kernel_for_dispatch_key, [each for each in names if torch._C._dispatch_has_kernel(each)]
    return any(has(each, "CompositeImplicitAutograd") and not has(each, f"Autograd{device.upper()}") for each in names)


def entries() -> list[Any]:
    """All operators of the database whose results are the operator's own."""
    database = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return [info for info in database.op_db if info.name not in MEMORY_AS_FOUND]


def main() -> None:
    """Print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    count = 0
    for info in (each for each in entries() if not options.only or each.name in options.only):
        lines = Counter(line.partition(": ")[2] for line in differing(info, options.device, options.samples, options.kernels))
        count += bool(lines)
        for line, times in lines.items():
            print(f"{info.name}{'.' * bool(info.variant_test_name)}{info.variant_test_name}: {times} x {line}", flush=True)
    print(f"{count} operators differ on {options.device}")


if __name__ == "__main__":
    main()
