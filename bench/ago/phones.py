"""ncnn and MNN, which people run on phones: a network is converted once, by each one's own converter, and run on this machine's CPU.

In float32, as all others: neither takes weights or sums of 16 bits. ncnn reads what pnnx makes of a traced network, MNN the exported ONNX.
What a converter does not know of a network is that contender's failure.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

_PATIENCE_S = 100
# The converter itself: `MNN.tools.mnnconvert` would first install what it sends statistics with.
_MNN = (
    "import sys, _tools\n"
    "_tools.mnnconvert(['mnnconvert', '-f', 'ONNX', '--modelFile', sys.argv[1], '--MNNModel', sys.argv[2], '--bizCode', 'bench'])"
)
_TRACED = (
    "import sys, torch; from bench.ago.networks import case\n"
    "with torch.no_grad(): torch.jit.trace(*case(sys.argv[1]).built(), check_trace=False).save(sys.argv[2])"
)
_NCNN_TYPES = {"float32": "f32", "int64": "i64"}


def mnn(onnx: Path, given: list[np.ndarray], threads: int) -> Callable[[], np.ndarray]:
    """Of an exported network."""
    import MNN.expr
    import MNN.nn

    model = onnx.with_suffix(".mnn")
    if not model.exists():
        _converted([sys.executable, "-c", _MNN, str(onnx), str(model)], model)
    manager = MNN.nn.create_runtime_manager(({"backend": "CPU", "numThread": threads, "precision": "high"},))
    net = MNN.nn.load_module_from_file(str(model), [], [], runtime_manager=manager, dynamic=False, shape_mutable=False)
    inputs = [_variable(each) for each in given]

    def run() -> np.ndarray:
        found = net.onForward(inputs)[0]
        return np.array(found.read(), copy=False)

    return run


def _variable(array: np.ndarray) -> object:
    import MNN.expr

    kinds = {"float32": (np.float32, MNN.expr.float), "int64": (np.int32, MNN.expr.int)}
    dtype, kind = kinds[str(array.dtype)]
    return MNN.expr.const(np.ascontiguousarray(array, dtype), list(array.shape), MNN.expr.NCHW, kind)


def ncnn(name: str, onnx: Path, given: list[np.ndarray], shape: tuple[int, ...], threads: int) -> Callable[[], np.ndarray]:
    """Of a network by name; its files lie beside the exported one. Results have that shape."""
    import ncnn as library
    import pnnx

    param, weights, traced = (onnx.with_suffix(suffix) for suffix in (".ncnn.param", ".ncnn.bin", ".pt"))
    if not param.exists():
        _converted([sys.executable, "-W", "ignore", "-c", _TRACED, name, str(traced)], traced)
        shapes = ",".join(f"[{','.join(map(str, each.shape))}]{_NCNN_TYPES[str(each.dtype)]}" for each in given)
        options = (f"inputshape={shapes}", f"ncnnparam={param}", f"ncnnbin={weights}", "fp16=0")
        _converted([str(Path(pnnx.__file__).with_name("pnnx")), str(traced), *options], param)
    net = library.Net()
    net.opt.num_threads = threads
    for lossy in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage"):
        setattr(net.opt, f"use_{lossy}", False)
    if net.load_param(str(param)) or net.load_model(str(weights)):
        raise RuntimeError("ncnn does not read what pnnx has made")
    names, (result,) = net.input_names(), net.output_names()
    mats = [library.Mat(np.ascontiguousarray(each[0], np.int32 if each.dtype == np.int64 else each.dtype)).clone() for each in given]

    def run() -> np.ndarray:
        with net.create_extractor() as extractor:
            for each, mat in zip(names, mats, strict=True):
                extractor.input(each, mat)
            return np.array(extractor.extract(result)[1]).reshape(shape)

    return run


def _converted(command: list[str], target: Path) -> None:
    """Raises RuntimeError where a converter leaves nothing."""
    done = subprocess.run(command, cwd=target.parent, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if not target.exists():
        said = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line or "Not Support" in line]
        raise RuntimeError(f"not converted: {re.sub(r'^.*: (?=These)', '', (said or ['without a word'])[-1].strip())}")
