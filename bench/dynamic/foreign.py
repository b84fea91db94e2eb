"""Programs that nobody here wrote, each as one step for a range of shapes, beside eager PyTorch.

    python -m bench.dynamic.foreign [--only PART ...] [--missing] [--limit-seconds 300]

Architectures of `bench.coverage`: rows and lengths of their batches are dimensions, dropout is on, AdamW trains. Each is trained for some
steps of random shapes without a limit and within one, and called with others in evaluation mode; all is compared to the last bit, and peaks
at further shapes with what was promised. Each is a process of its own, with a time limit. "refused" is a sentence of lowtide's own, which
the table has; "dead" is a process that ended without an answer.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import lowtide
from bench.bits import same_bits
from bench.coverage.subject import Subject, scalar_loss, tensors_of
from bench.coverage.subjects import SUBJECTS
from bench.dynamic.equal import Trained, trained_row
from bench.sweep import Row, Sweep, add_options

COLUMNS = ("subject", "way", "verdict", "steps", "different", "parts", "members", "worst_bytes_off", "seconds", "why")
NAMES = (
    "transformers/gpt_neo/causal", "transformers/gptj/causal", "transformers/mistral/causal", "transformers/opt/causal",
    "transformers/qwen3/causal", "transformers/gemma2/causal", "transformers/falcon/causal", "transformers/bloom/causal",
    "transformers/mixtral/causal", "transformers/mamba/unmasked", "transformers/xlnet/unmasked", "transformers/distilbert/masked",
    "transformers/roberta/masked", "transformers/albert/masked", "transformers/electra/masked", "transformers/deberta-v2/masked",
    "transformers/modernbert/masked", "transformers/bart/translation", "transformers/pegasus/translation", "transformers/t5/translation",
    "transformers/longformer/masked", "transformers/wav2vec2/waves", "transformers/vit/pictures", "transformers/segformer/pictures",
    "timm/resnet26", "timm/efficientnet_b0", "timm/mobilenetv3_small_050", "timm/convnext_atto", "timm/vit_tiny_patch16_224",
    "timm/mixer_s32_224", "torch.nn/transformer", "torch.nn/gru",
)  # fmt: skip
_STEPS, _SHAPES, _LIMIT = 8, 4, "85%"
_ROWS, _LENGTHS, _LENGTH = (2, 6), (8, 24), 16  # the last is that of the examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="subjects whose name has one of these parts")
    parser.add_argument("--trial", metavar="SUBJECT", help="one subject, in this process: its rows as lines of JSON")
    add_options(parser, limit_seconds=300.0)
    options = parser.parse_args()
    if options.trial:
        warnings.simplefilter("ignore")
        for row in _rows(next(each for each in SUBJECTS if each.name == options.trial)):
            print(json.dumps(row), flush=True)
        return
    names = SWEEP.selected(options, lambda name: any(part in name for part in options.only))
    rows = (row for name in names for row in _attempt(name, options.limit_seconds))
    SWEEP.run(rows, save=not options.no_save).print()


def _attempt(name: str, limit_seconds: float) -> list[Row]:
    """One subject in a process of its own."""
    command = [sys.executable, "-m", "bench.dynamic.foreign", "--trial", name]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    ended = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, env=environment, check=False)
        said, ended = done.stdout, f"exit code {done.returncode}: {(done.stderr.splitlines() or [''])[-1][:300]}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        said, ended = (error.stdout or b"").decode(), f"no answer in {limit_seconds:.0f} s"
    rows: list[Row] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if ended:
        rows.append({"subject": name, "way": "the rest", "verdict": "time-out" if ended.startswith("no answer") else "dead", "why": ended})
    return rows


def _rows(subject: Subject) -> Iterator[Row]:
    """Trained without a limit and within one, and called."""
    trained = _trained(subject)
    for way, memory in (("no limit", None), (_LIMIT, _LIMIT)):
        yield _judged(subject.name, way, lambda memory=memory: trained_row(trained, memory, _STEPS, _SHAPES))
    yield _judged(subject.name, "inference", lambda: _called(trained))


def _judged(name: str, way: str, run: Callable[[], Row]) -> Row:
    begun = time.perf_counter()
    try:
        found = run()
    except lowtide.LowtideError as error:
        found = {"verdict": "refused", "why": _told(error)}
    except Exception as error:
        found = {"verdict": "raised", "why": _told(error)}
    else:
        found["verdict"] = next((verdict for verdict in ("different", "over_limit", "unkept") if found.get(verdict)), "right")
    kept = {key: cell for key, cell in found.items() if key in COLUMNS}
    return {"subject": name, "way": way, **kept, "seconds": round(time.perf_counter() - begun, 1)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _called(trained: Trained) -> Row:
    """Random shapes in evaluation mode."""
    draws = random.Random(0)
    torch.manual_seed(0)
    model = trained.make().eval()
    twin = copy.deepcopy(model)
    example = trained.batch(*trained.shape(draws))
    call = lowtide.optimize(
        _Named(model), example, shapes=lowtide.Shapes(dynamic=trained.dynamic), planning=lowtide.Planning(progress=False)
    )
    different = 0
    for _ in range(_STEPS):
        batch = trained.batch(*trained.shape(draws))
        with torch.no_grad():
            pairs = [tensors_of(result) for result in (call(**batch), _Named(twin)(**batch))]
        different += len(pairs[0]) != len(pairs[1]) or not all(map(same_bits, *pairs))
    return {"steps": _STEPS, "different": different, "parts": len(call.ranges)}


class _Named(torch.nn.Module):
    """A model whose positional arguments have names: argument_0 and so on."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return _run(self.model, batch)


def _run(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    return model(*batch.values()) if "argument_0" in batch else model(**batch)


def _loss(model: torch.nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    return scalar_loss(lambda **named: _run(model, named), **batch)  # type: ignore[arg-type]


def _trained(subject: Subject) -> Trained:
    """A subject with the extents that vary: rows, and lengths where its batch has any."""
    given = subject.build()[1]
    example = given if isinstance(given, dict) else {f"argument_{place}": tensor for place, tensor in enumerate(given)}
    first = next(iter(example.values()))
    rows_at = 1 if subject.name in ("torch.nn/transformer", "torch.nn/gru") else 0  # these take time first
    rows = first.shape[rows_at]
    named = {
        name: {dim: word for dim, extent in enumerate(tensor.shape) if (word := _word(dim, extent, tensor, rows, rows_at))}
        for name, tensor in example.items()
    }
    words = list(dict.fromkeys(word for dims in named.values() for word in dims.values()))
    ranges = {"rows": (*_ROWS, 1), "length": (*_LENGTHS, 1), "targets": (4, 12, 1)}

    def batch(*numbers: int) -> dict[str, torch.Tensor]:
        wanted = dict(zip(words, numbers, strict=True))
        return {name: _stretched(tensor, {dim: wanted[word] for dim, word in named[name].items()}) for name, tensor in example.items()}

    return Trained(lambda: subject.build()[0], batch, _said(named, ranges), tuple(ranges[word] for word in words), _loss)


def _word(dim: int, extent: int, tensor: torch.Tensor, rows: int, rows_at: int) -> str:
    """What an extent is called; "" for one that does not vary. Pictures and what has more dimensions vary in their rows alone."""
    if dim == rows_at and extent == rows:
        return "rows"
    if tensor.dim() == 2 and rows_at == 0 and dim == 1:
        return "length" if extent == _LENGTH else "targets" if extent == 8 else ""
    return ""


def _said(named: dict[str, dict[int, str]], ranges: dict[str, tuple[int, int, int]]) -> dict[str, dict[int, Any]]:
    """As `dynamic` takes it: a range where a name comes first."""
    seen: set[str] = set()
    found: dict[str, dict[int, Any]] = {}
    for name, dims in named.items():
        for dim, word in dims.items():
            found.setdefault(name, {})[dim] = word if word in seen else (word, *ranges[word][:2])
            seen.add(word)
    return found


def _stretched(tensor: torch.Tensor, extents: dict[int, int]) -> torch.Tensor:
    """The example's data in turn, so that what belongs together stays together."""
    for dim, extent in extents.items():
        tensor = tensor.index_select(dim, (torch.arange(extent) * 5 + extent) % tensor.shape[dim])
    return tensor.clone()


def summary(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the rows come to."""
    counted = Counter((row["way"], row["verdict"]) for row in rows)
    ways = dict.fromkeys(row["way"] for row in rows)
    return tuple(f"{way}: {', '.join(f'{count} {verdict}' for (of, verdict), count in counted.items() if of == way)}" for way in ways)


SWEEP = Sweep("dynamic_foreign", "Programs that nobody here wrote, over ranges of shapes", COLUMNS, NAMES, summary)

if __name__ == "__main__":
    main()
