"""A server under load: the one of the page on inference, as it stands there, and the same with onnxruntime's session in the model's place.

    python -m bench.serve
    python -m bench.serve --cases "mobilenet_v2 224" --clients 4 --rounds 6

Both servers run, each with as many threads for an operator as are said; bursts of requests go to one and the other in turns. In a burst
each client sends its next request when the last is answered. Rates are the median over turns of a burst's requests by its seconds; waits
are those of all bursts together; processor time is the server's, by request. Clients are threads of one process, on the same processors
as the servers: they take part of what is measured, alike for both. `load` is the system's load average before the first burst.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.ago.contenders import frozen_file, onnx_file, reference, saved
from bench.ago.export import deviation, export
from bench.results import Cell, Results, with_kept

COLUMNS = (
    "case", "threads", "clients", "contender", "requests_per_s", "to_onnxruntime", "p50_us", "p99_us", "processor_us", "deviation",
    "requests", "load",
)  # fmt: skip
CASES = ("mobilenet_v2 224", "resnet18 224", "bert_tiny 128")
CONTENDERS = ("lowtide", "onnxruntime")
_PAGE = Path(__file__).parents[1] / "docs/how/cpu_inference.md"
_LOADS = "lowtide.load_frozen(sys.argv[1])"  # what the page's server calls
_PATIENCE_S = 300
_WARM_UP = 10  # requests
_TICKS = os.sysconf("SC_CLK_TCK")


def session(path: str, threads: int) -> object:
    """onnxruntime's, called as the page's server calls a model."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = made.get_inputs()
    return lambda x: torch.from_numpy(made.run(None, {given.name: x.numpy()})[0])


def script(contender: str, threads: int) -> str:
    """The server's text."""
    found = re.search(r"^```python serve\.py\n(.*?)^```$", _PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None or found[1].count(_LOADS) != 1:
        raise SystemExit(f"{_PAGE}: expected a block `python serve.py` that calls {_LOADS} once")
    if contender == "lowtide":
        return found[1]
    return found[1].replace(_LOADS, f"__import__('bench.serve').serve.session(sys.argv[1], {threads})")


@dataclass
class Server:
    """A process that answers, and what its bursts took."""

    contender: str
    port: int
    process: subprocess.Popen[bytes]
    rates: list[float] = field(default_factory=list)  # requests a second, by burst
    waits_us: list[float] = field(default_factory=list)
    processor_s: float = 0.0

    @classmethod
    def started(cls, contender: str, name: str, threads: int, folder: Path) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = frozen_file(name, folder) if contender == "lowtide" else onnx_file(name, folder)
        command = [sys.executable, "-W", "ignore", "-c", script(contender, threads), str(file), str(port)]
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stderr=subprocess.DEVNULL)
        return cls(contender, port, process)

    def wait(self) -> None:
        """Until it answers. Raises SystemExit where it ends before."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise SystemExit(f"{self.contender}: the server did not answer within {_PATIENCE_S} s, or ended")

    def burst(self, body: bytes, clients: int, seconds: float) -> None:
        """Requests for so long."""
        waits: list[list[float]] = [[] for _ in range(clients)]
        began, before = time.perf_counter(), self._processor_s()
        threads = [threading.Thread(target=self._client, args=(body, began + seconds, each)) for each in waits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        self.processor_s += self._processor_s() - before
        self.waits_us += [wait for each in waits for wait in each]
        self.rates.append(sum(map(len, waits)) / took)

    def answer(self, body: bytes) -> np.ndarray:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/", body)
        found: np.ndarray = np.load(io.BytesIO(connection.getresponse().read()))
        connection.close()
        return found

    def _client(self, body: bytes, until: float, waits_us: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        while (began := time.perf_counter()) < until:
            connection.request("POST", "/", body)
            connection.getresponse().read()
            waits_us.append((time.perf_counter() - began) * 1e6)
        connection.close()

    def _processor_s(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS


def main() -> None:
    options = _options()
    for name in options.cases:
        export(name, options.folder)
        if not frozen_file(name, options.folder).exists():
            saved(name, options.folder)
        for threads in options.threads:
            for clients in options.clients:
                _save(_measured(name, threads, clients, options)).print()


def _measured(name: str, threads: int, clients: int, options: argparse.Namespace) -> list[dict[str, Cell]]:
    load = os.getloadavg()[0]
    with np.load(onnx_file(name, options.folder).with_suffix(".npz")) as found:
        np.save(written := io.BytesIO(), found["arg0"])
    body, expected = written.getvalue(), reference(name, options.folder)
    off: dict[str, float] = {}
    servers = [Server.started(contender, name, threads, options.folder) for contender in CONTENDERS]
    try:
        for server in servers:
            server.wait()
            for _ in range(_WARM_UP):
                answer = server.answer(body)
            off[server.contender] = deviation(answer, expected)
        for _ in range(options.rounds):
            for server in servers:
                server.burst(body, clients, options.seconds)
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
    return [_row(name, threads, clients, server, servers[-1], load) | {"deviation": off[server.contender]} for server in servers]


def _row(name: str, threads: int, clients: int, server: Server, peer: Server, load: float) -> dict[str, Cell]:
    cuts = statistics.quantiles(server.waits_us, n=100)
    return {
        "case": name, "threads": threads, "clients": clients, "contender": server.contender,
        "requests_per_s": statistics.median(server.rates),
        "to_onnxruntime": statistics.median(own / other for own, other in zip(server.rates, peer.rates, strict=True)),
        "p50_us": cuts[49], "p99_us": cuts[98], "processor_us": server.processor_s / len(server.waits_us) * 1e6,
        "requests": len(server.waits_us), "load": load,
    }  # fmt: skip


def _save(rows: Sequence[dict[str, Cell]]) -> Results:
    notes = tuple((__doc__ or "").strip().split("\n\n")[-1].split("\n"))
    kept = with_kept("serve", rows, ("case", "threads", "clients", "contender"))
    Results("serve", "A server under load", COLUMNS, tuple(kept), notes).save()
    return Results("serve", "A server under load", COLUMNS, tuple(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8, help="bursts of each server")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a burst lasts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lowtide-ago", help="where exported networks lie")
    return parser.parse_args()


if __name__ == "__main__":
    main()
