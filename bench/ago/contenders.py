"""Ways to run a network: each makes a function without arguments that runs it once and gives its result as an array.

All get the same example each time, contiguous, as a user has it, and as many threads as are said. What they may do beforehand is theirs:
compile, fold, pack. float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.ago.networks import case

Run = Callable[[], np.ndarray]
PEERS = ("eager", "inductor", "onnxruntime", "openvino", "ncnn", "MNN")
OURS = ("lowtide", "lowtide frozen", "lowtide NI", "lowtide NR")  # NI: no intensive fusion, NR: no reformer


def make(contender: str, name: str, threads: int, folder: Path) -> Run:
    """The function. What was exported lies in `folder`. Raises whatever the contender raises."""
    return _MAKERS[contender](name, threads, folder)


def onnx_file(name: str, folder: Path) -> Path:
    """Where the exported network lies."""
    return folder / f"{name.replace(' ', '_')}.onnx"


def _eager(name: str, threads: int, folder: Path) -> Run:
    import torch

    torch.set_num_threads(threads)
    model, args = case(name).built()
    model = model.to(memory_format=torch.channels_last)
    args = tuple(arg.to(memory_format=torch.channels_last) if arg.dim() == 4 else arg for arg in args)
    return _torch(model, args)


def _inductor(name: str, threads: int, folder: Path) -> Run:
    import torch
    import torch._inductor.config

    torch.set_num_threads(threads)
    torch._inductor.config.freezing = True
    torch._inductor.config.compile_threads = 1
    model, args = case(name).built()
    return _torch(torch.compile(model, dynamic=False), args)


def _torch(model: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    import torch

    def run() -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = model(*args).numpy()
            return found

    return run


def _onnxruntime(name: str, threads: int, folder: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_file(name, folder), options, providers=["CPUExecutionProvider"])
    given = _given(name, folder)
    feed = dict(zip((each.name for each in session.get_inputs()), given, strict=True))
    return lambda: session.run(None, feed)[0]


def _openvino(name: str, threads: int, folder: Path) -> Run:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(onnx_file(name, folder), "CPU", settings)
    request, given = compiled.create_infer_request(), dict(enumerate(_given(name, folder)))

    def run() -> np.ndarray:
        found: np.ndarray = request.infer(given, share_inputs=True, share_outputs=True)[0]
        return found

    return run


def _ncnn(name: str, threads: int, folder: Path) -> Run:
    from bench.ago.phones import ncnn

    return ncnn(name, onnx_file(name, folder), _given(name, folder), reference(name, folder).shape, threads)


def _mnn(name: str, threads: int, folder: Path) -> Run:
    from bench.ago.phones import mnn

    return mnn(onnx_file(name, folder), _given(name, folder), threads)


def _lowtide(joins: str) -> Callable[[str, int, Path], Run]:
    def made(name: str, threads: int, folder: Path) -> Run:
        import torch

        import lowtide
        from bench.ago.blocks import all_legal, none
        from lowtide.cpu import networks

        torch.set_num_threads(threads)
        networks.tuned = {"BEST": networks.tuned, "NONE": none, "ALL": all_legal}[joins]
        model, args = case(name).built()
        return _torch(lowtide.optimize(model, args, exact=False), args)

    return made


def _frozen(name: str, threads: int, folder: Path) -> Run:
    import torch

    import lowtide

    torch.set_num_threads(threads)
    model, args = case(name).built()
    return _torch(lowtide.optimize(model, args, exact=False).frozen(*args), args)


def _loaded(name: str, threads: int, folder: Path) -> Run:
    """A frozen function from its file, in a process without the model; `saved` has written it."""
    import torch

    import lowtide

    torch.set_num_threads(threads)
    fn, args = lowtide.load_frozen(frozen_file(name, folder)), torch.load(f"{frozen_file(name, folder)}.batch")
    return _torch(fn, args)


def saved(name: str, folder: Path) -> None:
    """Write a frozen function to its file, and a batch beside it."""
    import torch

    import lowtide

    model, args = case(name).built()
    lowtide.optimize(model, args, exact=False).save_frozen(frozen_file(name, folder), *args)
    torch.save(args, f"{frozen_file(name, folder)}.batch")


def frozen_file(name: str, folder: Path) -> Path:
    """Where a frozen function lies."""
    return onnx_file(name, folder).with_suffix(".lowtide")


def _given(name: str, folder: Path) -> list[np.ndarray]:
    """The example, which an exporter saved: a peer's process need not import torch."""
    with np.load(onnx_file(name, folder).with_suffix(".npz")) as found:
        return [found[key] for key in sorted(found.files) if key != "reference"]


def reference(name: str, folder: Path) -> np.ndarray:
    """What float64 gives."""
    with np.load(onnx_file(name, folder).with_suffix(".npz")) as found:
        result: np.ndarray = found["reference"]
        return result


_MAKERS: Mapping[str, Callable[[str, int, Path], Run]] = {
    "eager": _eager,
    "inductor": _inductor,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "ncnn": _ncnn,
    "MNN": _mnn,
    "lowtide": _lowtide("BEST"),
    "lowtide frozen": _frozen,
    "lowtide loaded": _loaded,
    "lowtide NI": _lowtide("NONE"),
    "lowtide NR": _lowtide("ALL"),
}
