"""Orders of synthetic training steps of 1,000 to 1,000,000 operators: seconds, peaks, proven bounds, memory, and how seconds grow.

    python -m bench.large                 all sizes, each in a process of its own
    python -m bench.large --row chain 10000

A chain is a forward pass, its backward pass and SGD, with or without residual edges. A transformer step has attention and MLP blocks,
what the backward pass saves, a gradient for each parameter, views without bytes, and operators that may work in place. The updates
are written after the backward pass, as training loops write them, so that the order as written holds every gradient at once. A layered
graph is random: 16 nodes a layer, each of which reads up to three of the layer before, and some of them an older one. Seconds are those
of the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.results import Cell, Results
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import AUTO, schedule
from lowtide.schedule.auto import warm_up

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000)
COLUMNS = ("step", "operators", "built_seconds", "seconds", "peak_bytes", "lower_bound_bytes", "gap_percent", "status", "process_bytes")


@dataclass
class Step:
    """A training step under construction: a tape of what ran forward, played back for the gradients."""

    tensor_bytes: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    tape: list[Callable[[], None]] = field(default_factory=list)
    gradient: dict[int, int] = field(default_factory=dict)  # by tensor
    updates: list[Task] = field(default_factory=list)

    def given(self, nbytes: int) -> int:
        """A tensor that is there from the start."""
        self.tensor_bytes.append(nbytes)
        return len(self.tensor_bytes) - 1

    def node(self, name: str, reads: tuple[int, ...], nbytes: int, takes: int = -1, after: tuple[int, ...] = ()) -> int:
        """A node that makes one tensor, perhaps in the memory of the tensor `takes`."""
        made = self.given(nbytes)
        taken = ((takes, 0),) if takes >= 0 else ()
        self.tasks.append(Task(name, (made,), tuple(dict.fromkeys(reads)), after, takes=taken))
        return made

    def view(self, tensor: int) -> tuple[int, ...]:
        """A node without bytes; what it hands on is `tensor`, for nodes after it."""
        self.tasks.append(Task("view", reads=(tensor,)))
        return (len(self.tasks) - 1,)

    def linear(self, x: int, nbytes: int, weight_bytes: int, after: tuple[int, ...] = ()) -> int:
        """A layer with a parameter, whose gradient is made and used up by an update."""
        y = self.node("linear", (x,), nbytes, after=after)

        def backward() -> None:
            self.updates.append(Task("update", reads=(self.node("weight_grad", (x, self.gradient[y]), weight_bytes),)))
            self.add_gradient(x, self.node("input_grad", (self.gradient[y],), self.tensor_bytes[x]))

        self.tape.append(backward)
        return y

    def saving_input(self, name: str, x: int) -> int:
        """An operator of one input, which its gradient needs again: a norm, a GELU."""
        y = self.node(name, (x,), self.tensor_bytes[x])
        self.tape.append(lambda: self.add_gradient(x, self.node(name, (x, self.gradient[y]), self.tensor_bytes[x], self.gradient[y])))
        return y

    def saving_output(self, name: str, x: int) -> int:
        """An operator of one input whose gradient needs its output alone, so that it may work in place: a softmax."""
        y = self.node(name, (x,), self.tensor_bytes[x], x)
        self.tape.append(lambda: self.add_gradient(x, self.node(name, (y, self.gradient[y]), self.tensor_bytes[x], self.gradient[y])))
        return y

    def matmul(self, a: int, b: int, nbytes: int) -> int:
        """A product of two activations, through a view of the second."""
        y = self.node("matmul", (a, b), nbytes, after=self.view(b))

        def backward() -> None:
            self.add_gradient(a, self.node("matmul", (b, self.gradient[y]), self.tensor_bytes[a]))
            self.add_gradient(b, self.node("matmul", (a, self.gradient[y]), self.tensor_bytes[b]))

        self.tape.append(backward)
        return y

    def add(self, a: int, b: int) -> int:
        """A residual sum; its gradient goes to both as it is."""
        y = self.node("add", (a, b), self.tensor_bytes[a], b)

        def backward() -> None:
            for x in (a, b):
                self.add_gradient(x, self.gradient[y])

        self.tape.append(backward)
        return y

    def add_gradient(self, tensor: int, gradient: int) -> None:
        """Adds to the gradient of a tensor that is used more than once."""
        if tensor in self.gradient:
            gradient = self.node("add_grad", (self.gradient[tensor], gradient), self.tensor_bytes[tensor], self.gradient[tensor])
        self.gradient[tensor] = gradient

    def problem(self, output: int) -> OrderProblem:
        """The step with its backward pass from `output`."""
        self.gradient[output] = self.node("loss_grad", (output,), self.tensor_bytes[output])
        for backward in reversed(self.tape):
            backward()
        return OrderProblem.of(self.tensor_bytes, [*self.tasks, *self.updates])


def chain(operators: int, residual: int = 0) -> OrderProblem:
    """A chain of layers whose activations shrink in four stages while weights grow; a residual edge over every `residual` layers."""
    layers = operators * residual // (4 * residual + 2) if residual else operators // 4
    step = Step()
    x = skipped = step.given(4_816_896)
    for layer in range(layers):
        stage = 4 * layer // layers
        weight_bytes = (36_864 if layer % 3 else 16_384) * 4**stage
        x = step.linear(x, 6_422_528 >> stage, weight_bytes)
        if residual and layer % residual == residual - 1:
            x, skipped = (step.add(skipped, x) if step.tensor_bytes[skipped] == step.tensor_bytes[x] else x), x
    return step.problem(x)


def transformer(operators: int, tokens: int = 1024, width: int = 512, heads: int = 8) -> OrderProblem:
    """A stack of pre-norm blocks in 4-byte floats; 49 operators a block."""
    row_bytes, weight_bytes = 4 * tokens * width, 4 * width * width
    step = Step()
    x = step.linear(step.given(4 * tokens), row_bytes, weight_bytes)
    for _ in range(max(1, operators // 49)):
        normed = step.saving_input("norm", x)
        query, key, value = (step.linear(normed, row_bytes, weight_bytes, step.view(normed)) for _ in range(3))
        weights = step.saving_output("softmax", step.matmul(query, key, 4 * heads * tokens * tokens))
        x = step.add(x, step.linear(step.matmul(weights, value, row_bytes), row_bytes, weight_bytes))
        hidden = step.linear(step.saving_input("norm", x), 4 * row_bytes, 4 * weight_bytes)
        x = step.add(x, step.linear(step.saving_input("gelu", hidden), row_bytes, 4 * weight_bytes))
    return step.problem(step.linear(x, 4 * row_bytes, 4 * weight_bytes))


def layered(operators: int, width: int = 16, seed: int = 0) -> OrderProblem:
    """Random layers: each node reads a result of the layer before that is its own to read, up to two more, and one in four an older one."""
    draw = random.Random(seed)
    layers, tasks, sizes = max(2, operators // width), [Task("given", (0,))], [draw.randrange(1, 1 << 20)]
    made: list[list[int]] = [[0]]
    for _ in range(layers):
        layer = []
        for place in range(width):
            reads = [made[-1][place % len(made[-1])], *draw.sample(made[-1], min(len(made[-1]), draw.randrange(3)))]
            if draw.random() < 0.25:
                reads.append(draw.choice(made[-draw.randint(1, min(8, len(made)))]))
            sizes.append(draw.randrange(1, 1 << 20))
            tasks.append(Task("node", (len(sizes) - 1,), tuple(dict.fromkeys(reads))))
            layer.append(len(sizes) - 1)
        made.append(layer)
    return OrderProblem.of(sizes, tasks)


STEPS: dict[str, Callable[[int], OrderProblem]] = {
    "chain": chain,
    "chain, residual": lambda operators: chain(operators, residual=3),
    "transformer": transformer,
    "layered": layered,
}


def row(step: str, operators: int) -> dict[str, Cell]:
    """One line of the table, measured in this process once kernels are compiled."""
    warm_up(AUTO)
    schedule(STEPS[step](200))
    start = time.process_time()
    problem = STEPS[step](operators)
    built_seconds, start = time.process_time() - start, time.process_time()
    found = schedule(problem)
    return {
        "step": step,
        "operators": problem.node_count,
        "built_seconds": round(built_seconds, 2),
        "seconds": round(time.process_time() - start, 2),
        "peak_bytes": found.peak_bytes,
        "lower_bound_bytes": found.lower_bound_bytes,
        "gap_percent": round(100 * (found.peak_bytes / found.lower_bound_bytes - 1), 4),
        "status": found.status.name.lower(),
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def growth(rows: list[dict[str, Cell]]) -> str:
    """The exponent with which seconds grow with operators, from the third largest size of each step to the largest."""
    said = []
    for step in dict.fromkeys(str(line["step"]) for line in rows):
        sizes = [line for line in rows if line["step"] == step]
        small, large = sizes[max(0, len(sizes) - 3)], sizes[-1]
        seconds, operators = (
            math.log(max(float(large[by] or 0), 0.01) / max(float(small[by] or 0), 0.01)) for by in ("seconds", "operators")
        )
        said.append(f"{step} {seconds / operators:.2f}" if operators else f"{step} ?")
    return "seconds grow as operators to the power of: " + ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("STEP", "OPERATORS"), help="measure one line here and print it as JSON")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="leave out larger sizes")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(row(arguments.row[0], int(arguments.row[1]))))
        return
    rows = []
    for step in STEPS:
        for operators in (size for size in SIZES if size <= arguments.largest):
            command = [sys.executable, "-m", "bench.large", "--row", step, str(operators)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print(rows[-1], flush=True)
    results = Results("large", "Orders of synthetic training steps", COLUMNS, tuple(rows), (growth(rows),))
    results.save()
    results.print()


if __name__ == "__main__":
    main()
