"""The sections of the results page on inference by generated kernels."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean

from bench.tables_parts import Row, rows_of, section

_PEERS = ("onnxruntime", "openvino", "inductor", "ncnn", "MNN", "eager")


_SERVERS = ("lowtide", "onnxruntime")
_NAMES = ("lowtide", "lowtide frozen", "lowtide NI", "lowtide NR", *_PEERS)


def inference() -> tuple[str, ...]:
    """Times beside peers, a server, memory, what it takes to make kernels, and partitions."""
    return _times(), _others(), _pairs(), _served(), _tuning(), _memory(), _compiling(), _partitions(), _compiled()


def _times() -> str:
    means = (
        f"{threads} thread{'s' * (threads > 1)}: {_mean(threads, 'lowtide')}, frozen {_mean(threads, 'lowtide frozen')}"
        for threads in (1, 2)
    )
    return _beside_peers(
        "Inference of one example",
        "ago",
        'python -m bench.ago --contenders lowtide "lowtide frozen" "lowtide NI" "lowtide NR" onnxruntime openvino inductor eager',
        "float32, random weights, milliseconds, with 1 thread and 2; each contender is a process of its own, and they take turns. NI is\n"
        "lowtide without intensive fusion, NR with all of it that is legal. A ratio is to the best peer that ran beside it. The geometric\n"
        f"mean of these is, with {'; with '.join(means)}.",
        "network, pixels or tokens, threads",
    )


def _mean(threads: int, contender: str) -> str:
    ratios = [row["to_best_peer"] for row in rows_of("ago") if row["threads"] == threads and row["contender"] == contender]
    return f"{geometric_mean(ratios):.3f}"


def _others() -> str:
    return _beside_peers(
        "Networks that nobody tuned for",
        "ago_others",
        "python -m bench.ago --cases efficientnet ghostnet .. --save ago_others",
        "Small networks of timm at 224 pixels, as above.",
        "network, pixels, threads",
    )


def _pairs() -> str:
    return _beside_peers(
        "Two operators as one kernel",
        "ago_pairs",
        "python -m bench.ago --cases pair .. --save ago_pairs",
        "The pairs of AGO's figure 13, each operator with its norm and clamp, 24 and 144 channels of 56 x 56 pixels; batches of 1 and 4.",
        "pair, batch, threads",
    )


def _beside_peers(title: str, table: str, command: str, note: str, what: str) -> str:
    by_case: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows_of(table):
        by_case.setdefault((row["case"], row["threads"]), {})[row["contender"]] = row
    names = [name for name in _NAMES if any(name in found for found in by_case.values())]
    lines = [
        [f"{case.removeprefix('pair ')}, {threads}", *(_ms(found.get(name)) for name in names), _ratio(found.get("lowtide"))]
        for (case, threads), found in by_case.items()
    ]
    return section(title, table, command, note, (what, *names, "lowtide over the best peer"), lines)


def _served() -> str:
    by_setting: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows_of("serve"):
        by_setting.setdefault((row["case"], row["threads"], row["clients"]), {})[row["contender"]] = row
    columns = ("requests_per_s", "p50_us", "p99_us", "processor_us")
    lines = [
        [
            f"{case}, {threads}",
            str(clients),
            *(f"{found[name][column] / (1e3 if column.endswith('_us') else 1):.1f}" for column in columns for name in _SERVERS),
            f"{found['lowtide']['to_onnxruntime']:.2f}",
        ]
        for (case, threads, clients), found in by_setting.items()
    ]
    heads = ("requests a second", "half wait less, ms", "99 of 100 wait less, ms", "processor, ms a request")
    loads = [row["load"] for row in rows_of("serve")]
    return section(
        "A server under load",
        "serve",
        "python -m bench.serve",
        "The server of the page on [inference](how/cpu_inference.md#serve-it), a thread of Python for each client, and the same with\n"
        "onnxruntime's session in the place of the loaded function. Both run, and bursts of requests go to one and the other in turns.\n"
        "lowtide runs one request after another, onnxruntime several at a time. Clients run on the same two processors, and other work\n"
        f"ran beside: the load average was {min(loads):.1f} to {max(loads):.1f} before the bursts. Waits are long where it was high.",
        ("network, threads", "clients", *(f"{name}: {head}" for head in heads for name in _SERVERS), "rate over onnxruntime's"),
        lines,
    )


def _tuning() -> str:
    lines = [
        [
            f"{row['case']}, {row['threads']}",
            str(row["windows"]),
            str(row["differ"]),
            *(_ms({"time_us": row[f"{how}_us"], "spread_us": 0}) for how in ("none", "model", "measured")),
            f"{row['measured_to_model']:.3f}",
        ]
        for row in rows_of("ago_tuning")
    ]
    return section(
        "Which operators share a kernel: modelled and measured",
        "ago_tuning",
        "python -m bench.ago.tuning --threads 1",
        "The same networks with the kernels that the model chooses, with those that were measured to be faster where the model cannot\n"
        "tell, and with every operator apart; milliseconds, in turns in one process. Windows are those around which blocks can be made.",
        ("network, pixels or tokens, threads", "windows", "chosen otherwise", "apart", "by the model", "measured", "measured over model"),
        lines,
    )


def _compiled() -> str:
    lines = [
        [
            f"{row['model']}, {row['batch_size']}",
            str(row["threads"]),
            row["contender"],
            *(f"{row[name]:.0f}" for name in ("cpu_ms", "cold_s", "cached_s")),
            f"{row['over_torch_compile']:.2f}",
            _mib(row, "promised_bytes"),
            _mib(row, "peak_bytes"),
            f"{row['deviation']:.1e}",
        ]
        for row in rows_of("compiled")
    ]
    return section(
        "Compiled training steps beside torch.compile",
        "compiled",
        "python -m bench.compiled",
        "Training steps with AdamW, float32, no dropout, in turns in one process: processor time in milliseconds, MiB above what the\n"
        'caller holds. `compiled` is lowtide\'s `kernels="compiled"`, `regions alone` the same where the backward pass computes nothing\n'
        "again, `least held` where it computes whatever holds less, `exact` lowtide's default. Cold is until the second step has run,\n"
        "with empty caches, in seconds; cached is that in a second process. What is made after `compiled` finds most kernels compiled.\n"
        "Deviation is that of all parameters after two steps from those of float64, over how far they move.",
        ("model, batch", "threads", "", "time", "cold", "cached", "over torch.compile", "promised", "peak", "deviation"),
        lines,
    )


_OF_A_SECOND = (
    " What a first function takes above that is what torch and Python keep of operators that they have not met before: pages of\n"
    "torch's code, and Python's own memory. The last columns are what a second function of the same network takes."
)


def _memory() -> str:
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows_of("ago_memory"):
        by_case.setdefault(row["case"], {})[row["contender"]] = row
    names = ("lowtide", "lowtide frozen", "lowtide loaded", "onnxruntime", "openvino", "eager")
    seconds = names[1:5] if any(row.get("more_bytes") for row in rows_of("ago_memory")) else ()
    columns = (
        *((name, "promised_bytes") for name in names[:2]),
        *((name, "peak_bytes") for name in names),
        *((name, "more_bytes") for name in seconds),
    )
    lines = [[case, *(_mib(found.get(name), column) for name, column in columns)] for case, found in by_case.items()]
    return section(
        "Memory of functions for inference",
        "ago_memory",
        "python -m bench.ago.memory",
        "MiB of resident memory while a function runs, above what its process has once the libraries are there; weights included.\n"
        "lowtide leaves the model's weights to the caller, and has them a second time, as its kernels read them; a frozen function has\n"
        "them once, as the peers; a loaded one is that from a file, in a process without the model. Promised is what the plan says of\n"
        "weights, kernels' weights and activations, and what a frozen function\n"
        f"holds.{_OF_A_SECOND if seconds else ''}",
        ("network, pixels or tokens", "promised", "frozen, promised", *names, *(f"second {name}" for name in seconds)),
        lines,
    )  # fmt: skip


def _mib(row: Row | None, column: str) -> str:
    return "" if row is None or row.get(column) is None else f"{row[column] / 2**20:.1f}"


def _ms(row: Row | None) -> str:
    if row is None or row["time_us"] is None:
        return ""
    return f"{'~' if row['spread_us'] > 0.2 * row['time_us'] else ''}{row['time_us'] / 1e3:.2f}"


def _ratio(row: Row | None) -> str:
    return "" if row is None or row["to_best_peer"] is None else f"{row['to_best_peer']:.2f}"


def _compiling() -> str:
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows_of("ago_compiling"):
        by_case.setdefault(row["case"], {})[row["cache"]] = row
    lines = [
        [
            case,
            *(_seconds(found.get(cache), column) for cache in ("empty", "filled") for column in ("seconds", "processor_s", "optimize_s")),
        ]
        for case, found in by_case.items()
    ]
    return section(
        "What generated kernels take to be made",
        "ago_compiling",
        "python -m bench.ago.compiling",
        "Seconds, with an empty cache, and in the next process, which finds in it what the first one left: what passes while regions are\n"
        "found, compiled, measured beside torch's operators and loaded; what this process and its compilers compute meanwhile; and all of\n"
        "`lowtide.optimize`, with capture and plan. Our own kernels, which numba compiles once a machine, are there in both.\n"
        "Much other work ran beside these, which processor seconds show less of.",
        ("network", "empty", "processor", "optimize", "filled", "processor", "optimize"),
        lines,
    )


def _seconds(row: Row | None, column: str) -> str:
    if row is None or row[column] is None:
        return ""
    return f"{row[column]:.2f}" if row[column] < 1 else f"{row[column]:.1f}"


def _partitions() -> str:
    rows = rows_of("ago_partitions")
    lines: Iterable[list[str]] = (
        [
            row["network"],
            row["rule"],
            str(row["clusters"]),
            f"{row['mean']:.0f}",
            f"{row['median']:.0f}",
            f"{row['jain']:.2f}",
            str(row["trivial"]),
        ]
        for row in rows
    )
    return section(
        "Partitions of networks",
        "ago_partitions",
        "python -m bench.ago.partitions",
        "AGO's Algorithm 1 over operators, over units (an operator with the simple ones around it), and a rule like Relay's. Weights are\n"
        "linear in the extents of loops, as in the paper; its slope and bias are not published. The paper has, for MobileViT: 82 clusters\n"
        "of weight 437 on average, median 350, Jain's index 0.55; Relay 259, 138, 23, 0.19, of which 105 are trivial.",
        ("network", "rule", "clusters", "mean weight", "median", "Jain's index", "trivial"),
        lines,
    )
