"""What a function for inference takes of memory, beside what people deploy: resident memory of a process of its own, one thread.

    python -m bench.ago.memory
    python -m bench.ago.memory --cases squeezenet --contenders lowtide onnxruntime

Resident memory above what the process has once its libraries are loaded and have made one small function. "held" is what is there after
the first runs, weights included; "peak" the most while it runs; "more" what a second function of the same network takes beside the first:
the first also pays for what its library and Python keep of operators that they have not met before. All that was freed is given back to
the system before. lowtide and eager keep the model as the caller has it, lowtide also weights as its kernels read them; "promised" is what
the plan says of these and of activations. A frozen function has no model, as the peers; what is promised of it is what it holds. Compilers
have filled their caches before. A loaded function is a frozen one that a process without the model reads from a file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.ago.export import export
from bench.ago.networks import case, paper_cases
from bench.results import Cell, Results, with_kept

COLUMNS = ("case", "contender", "held_bytes", "peak_bytes", "more_bytes", "promised_bytes", "failed")
CONTENDERS = ("eager", "onnxruntime", "openvino", "lowtide", "lowtide frozen", "lowtide loaded")
_CODE = "import sys; from bench.ago.memory import taken; taken(*sys.argv[1:4])"
_SAVING = "import sys; from pathlib import Path; from bench.ago.contenders import saved; saved(sys.argv[1], Path(sys.argv[2]))"
_PATIENCE_S = 300
_SMALL = ("squeezenet 56", "shufflenet_v2 56")  # of the first that is another each library makes a function first


def taken(contender: str, name: str, folder: str) -> None:
    """Print what one function takes in this process, as JSON."""
    from bench.ago.contenders import make

    make(contender, next(small for small in _SMALL if small != name), 1, Path(folder))()
    if "torch" in sys.modules and contender != "lowtide loaded":
        case(name).built()  # imports what it is written with
    base = _settled_bytes()
    run = make(contender, name, 1, Path(folder))
    for _ in range(3):
        run()
    held = _settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    for _ in range(5):
        run()
    peak, held_again = _status_bytes("VmHWM"), _settled_bytes()
    another = make(contender, name, 1, Path(folder))
    for _ in range(3):
        another()
    more = _settled_bytes() - held_again
    found = {"held_bytes": held - base, "peak_bytes": peak - base, "more_bytes": more, "promised_bytes": _promised_bytes(run)}
    print(json.dumps(found))


def _settled_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def _promised_bytes(run: object) -> int | None:
    """What one of our functions promises."""
    if "lowtide" not in sys.modules:
        return None
    from lowtide import Frozen, Step

    for cell in getattr(run, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Step):
            return int(cell.cell_contents.plan.peak_bytes)
        if isinstance(cell.cell_contents, Frozen):
            return cell.cell_contents.held_bytes
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ago.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=[], help="names, or how they begin; without, the paper's fourteen")
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS], choices=CONTENDERS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lowtide-ago", help="where exported networks lie")
    options = parser.parse_args()
    for name in _SMALL:
        export(name, options.folder)
    for name in (each.name for each in paper_cases()):
        if not options.cases or name.startswith(tuple(options.cases)):
            export(name, options.folder)
            save([{"case": name, "contender": each, **_asked(each, name, options.folder)} for each in options.contenders]).print()


def save(rows: Sequence[dict[str, Cell]]) -> Results:
    """Put rows into the table; it is saved after each network."""
    notes = tuple((__doc__ or "").strip().split("\n\n")[-1].split("\n"))
    kept = with_kept("ago_memory", rows, ("case", "contender"))
    Results("ago_memory", "What functions for inference take of memory", COLUMNS, tuple(kept), notes).save()
    return Results("ago_memory", "What functions for inference take of memory", COLUMNS, tuple(rows))


def _asked(contender: str, name: str, folder: Path) -> dict[str, Cell]:
    command = [sys.executable, "-W", "ignore", "-c", _CODE, contender, name, str(folder)]
    try:
        if contender == "lowtide loaded":
            for each in {name, *_SMALL}:
                subprocess.run([sys.executable, "-W", "ignore", "-c", _SAVING, each, str(folder)], capture_output=True, check=True)
        if contender.startswith("lowtide"):
            subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=True)  # fills the caches
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {_PATIENCE_S} s"}
    except subprocess.CalledProcessError as error:
        return {"failed": (error.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: dict[str, Cell] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
