"""One part in this process: each row that it finds as a line of JSON, at once.

python -m bench.on_gpu.one "exact: gpt2, bf16"
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import IO

import torch

import lowtide
from bench.on_gpu.ground import Ground, locked, still, take_place
from bench.on_gpu.parts import PARTS
from lowtide.cost.trials import Trials

_places: list[IO[str]] = []


def main() -> None:
    warnings.simplefilter("ignore")
    part = next(each for each in PARTS if each.name == sys.argv[1])
    ground = Ground.here()
    if ground.on_gpu:
        _try_alone()
    if ground.computes_nothing:
        torch.backends.cuda.enable_cudnn_sdp(False)  # which the null device has not
    try:
        for row in part.rows(ground):
            print(json.dumps({"device": ground.name} | row), flush=True)
    except lowtide.LowtideError as error:
        print(json.dumps({"device": ground.name, "verdict": "refused", "why": _told(error)}), flush=True)
    except Exception as error:
        print(json.dumps({"device": ground.name, "verdict": "raised", "why": _told(error)}), flush=True)


def _try_alone() -> None:
    """Have operators tried while no other part uses the device, and timed while all others stand still."""
    _places.append(take_place())
    with locked():  # its file is open from here on
        pass
    for name, apart in (("launches", still), ("level", locked)):
        setattr(Trials, name, apart()(getattr(Trials, name)))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


if __name__ == "__main__":
    main()
