"""What people train with when memory is short: 8-bit optimizers, weights in 4 and 8 bits, low-rank gradients; alone and with lowtide.

    python -m bench.few_bits [--only NAME ...] [--steps 12]

Wants bitsandbytes, torchao, galore-torch, prodigyopt, peft and transformers; ways whose library is missing are left out. A process for each
way. Both train a copy of the model and take turns of one step. Times are of processors, the ratio a median over turns. Peaks are the
allocator's above what lies there between steps. The limit is 70 % of what eager takes above that. Losses,
parameters and states are compared to the last bit. Parts that a library compiles run as they are written, in eager PyTorch as well.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from bench import torchvision_shim
from bench.results import Results
from lowtide.base.skeleton import leaves
from lowtide.cost.profiler import measure_memory

COLUMNS = (
    "way",
    "library",
    "resident_mib",
    "eager_mib",
    "lowtide_mib",
    "promised_mib",
    "limit_mib",
    "time_ratio",
    "limit_time_ratio",
    "equal",
)
NOTES = (
    "resident: weights, state and batch; the other sizes are above that. Llama of 4 layers, width 256, vocabulary 512; 2 x 128 tokens, "
    "float32 but for what is quantised, one thread",
)
_MIB, _SHARE = 2**20, 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=12, help="of each, after two that do not count")
    parser.add_argument("--one", help="for the process of its own")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_row(options.one, options.steps)))
        return
    rows = []
    for way in options.only:
        library = WAYS[way][0]
        if importlib.util.find_spec(library) is None:
            print(f"{way}: left out, no {library} here", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "bench.few_bits", "--one", way, "--steps", str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{way}: {done.stderr[-600:]}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = Results("few_bits", "Few bits", COLUMNS, tuple(rows), NOTES)
    table.print()
    table.save()


def _row(way: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    warnings.simplefilter("ignore")
    torchvision_shim.install()
    tokens = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(0))
    eager, ours, within = (_made(way) for _ in range(3))

    def step_of(memory: Any, trained: tuple[nn.Module, torch.optim.Optimizer]) -> lowtide.Step:
        return lowtide.optimize(trained[0], tokens, loss=_loss, optimizer=trained[1], memory=memory)

    def plain() -> torch.Tensor:
        loss = _loss(eager[0], tokens)
        loss.backward()
        eager[1].step()
        eager[1].zero_grad()
        return loss

    first = step_of(None, ours)
    calls: dict[str, Callable[[], Any]] = {"eager": plain, "lowtide": lambda: first(tokens)}
    equal = all(torch.equal(calls["eager"](), calls["lowtide"]()) for _ in range(2))
    peaks = {name: measure_memory(call, warmup=1).above_bytes for name, call in calls.items()}
    resident = first.plan.resident_bytes
    second = step_of(resident + int(_SHARE * peaks["eager"]), within)
    calls["limit"] = lambda: second(tokens)
    for _ in range(4):
        calls["limit"]()
    limit_peak = measure_memory(calls["limit"], warmup=1).above_bytes
    times: dict[str, list[int]] = {name: [] for name in calls}
    for turn in range(steps):
        for name in reversed(calls) if turn % 2 else calls:
            begin = time.process_time_ns()
            calls[name]()
            times[name].append(time.process_time_ns() - begin)
    equal = equal and _same(eager, ours)
    ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["eager"], strict=True)) for name in ("lowtide", "limit")}
    return {
        "way": way,
        "library": WAYS[way][0],
        "resident_mib": resident / _MIB,
        "eager_mib": peaks["eager"] / _MIB,
        "lowtide_mib": peaks["lowtide"] / _MIB,
        "promised_mib": (first.plan.peak_bytes - resident) / _MIB,
        "limit_mib": limit_peak / _MIB,
        "time_ratio": ratios["lowtide"],
        "limit_time_ratio": ratios["limit"],
        "equal": str(equal),
    }


def _same(one: Any, other: Any) -> bool:
    """Whether parameters and states are the same, to the last bit."""
    pairs = [(a, b) for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True) if a.requires_grad]
    states = [[item for _, item in leaves(each[1].state_dict()["state"]) if isinstance(item, torch.Tensor)] for each in (one, other)]
    return all(torch.equal(a, b) for a, b in [*pairs, *zip(*states, strict=True)])


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )  # fmt: skip


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return adapted


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    parents = [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]
    return [(parent, name, child) for parent in parents for name, child in parent.named_children() if isinstance(child, nn.Linear)]


def _four_bits() -> nn.Module:
    import bitsandbytes as bnb

    model = _llama()
    for parent, name, old in _linears(model):
        new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        setattr(parent, name, new.to("cpu"))
    return _with_adapters(model)


def _eight_bits() -> nn.Module:
    import bitsandbytes as bnb

    model = _llama()
    for parent, name, old in _linears(model):
        new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
        new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        setattr(parent, name, new.to("cpu"))
    return _with_adapters(model)


def _int8_weights() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    return _with_adapters(model)


def _of(path: str, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
        optimizer: torch.optim.Optimizer = kind([each for each in model.parameters() if each.requires_grad], **settings)
        return optimizer

    return make


def _galore(model: nn.Module) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    wide = [each for parent, _, child in _linears(model) for each in child.parameters()]
    others = [each for each in model.parameters() if not any(each is other for other in wide)]
    optimizer: torch.optim.Optimizer = GaLoreAdamW(
        [{"params": others}, {"params": wide, "rank": 16, "update_proj_gap": 50, "scale": 0.25, "proj_type": "std"}], lr=1e-3
    )
    return optimizer


_ADAMW = _of("torch.optim.AdamW", lr=1e-3)
WAYS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "AdamW": ("torch", _llama, _ADAMW),
    "AdamW in 8 bits": ("bitsandbytes", _llama, _of("bitsandbytes.optim.AdamW8bit", lr=1e-3)),
    "AdamW in 8 bits, torchao": ("torchao", _llama, _of("torchao.optim.AdamW8bit", lr=1e-3)),
    "AdamW in 4 bits, torchao": ("torchao", _llama, _of("torchao.optim.AdamW4bit", lr=1e-3)),
    "GaLore": ("galore_torch", _llama, _galore),
    "Prodigy": ("prodigyopt", _llama, _of("prodigyopt.Prodigy")),
    "LoRA": ("peft", lambda: _with_adapters(_llama()), _ADAMW),
    "QLoRA, nf4": ("bitsandbytes", _four_bits, _ADAMW),
    "LoRA on LLM.int8()": ("bitsandbytes", _eight_bits, _ADAMW),
    "LoRA on int8, torchao": ("torchao", _int8_weights, _ADAMW),
}


def _made(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, build, optimizer = WAYS[way]
    model = build().train()
    return model, optimizer(model)


if __name__ == "__main__":
    main()
