"""What cutting along rows would buy, with halos: a trial by hand of what lowtide's splits do not do yet, on U-Net for one picture.

    python -m bench.halos [--sides 256 512] [--strips 4 8 16]

A convolution of 3x3 looks at a row above and below, so that rows can run in strips only if each strip takes some rows more, which its
neighbours compute as well. Here the level of full size runs so, down and up again: a strip of the skip is made again on the way up, and
neither of them is ever whole. Two convolutions down and two up take 2 rows more on either side, and 4. Everything else is as it was.
Beside it: eager, and lowtide's function of the same network with the same bits. One thread, peaks above what the caller holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lowtide
from bench.models.unets import UNet
from bench.results import Results
from lowtide.cost.profiler import measure_memory

COLUMNS = ("side", "how", "peak_mib", "wall_ms", "to_eager", "rows_again", "deviation")
NOTES = ("rows_again: of full size, those computed beyond the network's own; deviation: the largest, to the largest score",)
_MIB, _ROUNDS = 2**20, 3
_CONVOLUTIONS = 2  # of a level, one way: each looks at one row above and below


def by_strips(net: UNet, picture: Tensor, strips: int) -> Tensor:
    """[1, classes, h, w] the scores, of which the level of full size runs in so many strips of rows."""
    pooled = [net.pool(_skip(net, picture, rows)) for rows in _strips(picture, strips)]
    skips = [net.down[1](torch.cat(pooled, dim=2))]
    pooled.clear()
    for block in net.down[2:]:
        skips.append(block(net.pool(skips[-1])))
    x = skips.pop()
    for up, merge in zip(list(reversed(net.up))[:-1], list(reversed(net.merge))[:-1], strict=True):
        x = merge(torch.cat([skips.pop(), up(x)], dim=1))
    return torch.cat([_scores(net, picture, x, rows) for rows in _strips(picture, strips)], dim=2)


def _scores(net: UNet, picture: Tensor, x: Tensor, rows: range) -> Tensor:
    """Of some rows: those that the way up looks at beside them come from the coarser level, two rows from one."""
    low, high = _with_halo(rows, _CONVOLUTIONS, picture.shape[2])
    raised = net.up[0](x[:, :, low // 2 : -(-high // 2)])[:, :, low % 2 : low % 2 + high - low]
    merged = net.merge[0](torch.cat([_skip(net, picture, range(low, high)), raised], dim=1))
    scores: Tensor = net.head(merged[:, :, rows.start - low : rows.stop - low])
    return scores


def _skip(net: UNet, picture: Tensor, rows: range) -> Tensor:
    """What the level of full size makes on the way down, some rows of it."""
    low, high = _with_halo(rows, _CONVOLUTIONS, picture.shape[2])
    made: Tensor = net.down[0](picture[:, :, low:high])[:, :, rows.start - low : rows.stop - low]
    return made


def _with_halo(rows: range, halo: int, height: int) -> tuple[int, int]:
    return max(0, rows.start - halo), min(height, rows.stop + halo)


def _strips(picture: Tensor, count: int) -> Iterator[range]:
    """Rows by strip; all of them even, so that pooling never looks across."""
    height = picture.shape[2]
    step = 2 * -(-height // (2 * count))
    return (range(low, min(low + step, height)) for low in range(0, height, step))


def _rows_again(picture: Tensor, strips: int) -> float:
    """Rows that convolutions at full size compute more than the network's own, to those."""
    height, made = picture.shape[2], 0
    for rows in _strips(picture, strips):
        near = range(*_with_halo(rows, _CONVOLUTIONS, height))
        far = range(*_with_halo(near, _CONVOLUTIONS, height))
        made += _CONVOLUTIONS * (2 * len(near) + len(far))  # down; up, and what that makes again of the way down
    return made / (2 * _CONVOLUTIONS * height) - 1


def _measured(run: Callable[[], Tensor], expected: Tensor | None) -> dict[str, float]:
    made = run()
    deviation = 0.0 if expected is None else float((made - expected).abs().max() / expected.abs().max())
    took: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        took.append(1e3 * (time.perf_counter() - start))
    return {"peak_mib": measure_memory(run).above_bytes / _MIB, "wall_ms": statistics.median(took), "deviation": deviation}


@torch.no_grad()
def _rows(side: int, strips: list[int]) -> Iterator[dict[str, str | float]]:
    torch.manual_seed(0)
    net, picture = UNet().eval(), torch.randn(1, 1, side, side)
    expected = net(picture)
    planned = lowtide.optimize(net, (picture,), planning=lowtide.Planning(progress=False))
    ways: dict[str, Callable[[], Tensor]] = {"eager": lambda: net(picture), "lowtide": lambda: planned(picture)}
    ways |= {f"{count} strips": lambda count=count: by_strips(net, picture, count) for count in strips}
    eager_ms = 0.0
    for how, run in ways.items():
        row = _measured(run, expected)
        eager_ms = eager_ms or row["wall_ms"]
        again = _rows_again(picture, int(how.split(" ")[0])) if how.endswith("strips") else 0.0
        yield {"side": side, "how": how, **row, "to_eager": row["wall_ms"] / eager_ms, "rows_again": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--strips", nargs="+", type=int, default=[4, 8, 16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for side in options.sides for row in _rows(side, options.strips)]
    results = Results("halos", "U-Net for one picture, rows in strips with halos, by hand", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


if __name__ == "__main__":
    main()
