"""What is foretold of PyTorch's allocator on a GPU, and why its library cannot be had, where no GPU is."""

import sys
from pathlib import Path

import pytest
import torch

from lowtide.cuda import absent, forecast, native
from lowtide.cuda.forecast import MemoryRequest, eager_memory, requests_of, simulated_allocator
from lowtide.cuda.segments import ExpandableAllocator
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.plan.contents import Contents, Provenance
from lowtide.runtime.libraries import NativeError

KIB, MIB = 2**10, 2**20


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)


def value(name, nbytes, kind=Kind.ACTIVATION):
    return Value(name, Storage(name, nbytes, "cuda:0", kind), "uint8", (nbytes,), (1,))


def contents(graph, *workspace_bytes):
    places = tuple(range(len(graph.nodes)))
    provenance = Provenance("0", "0", "cuda:0", "3", 1)
    return Contents(graph, places, (-1,) * len(places), workspace_bytes, 0, 0, 0, 0, "optimal", "none", provenance, granule_bytes=512)


@pytest.mark.parametrize(("workspace_bytes", "spaces"), [(7 * KIB, []), (8 * KIB, [MemoryRequest(KIB, 0, 1)])])
def test_memory_that_an_operator_asks_for_before_its_results_is_no_workspace(workspace_bytes, spaces):
    """cudnn's batch norm has two tensors like its second argument, which nobody reads: of 3.5 KiB, as the allocator rounds."""
    x, like, made = value("x", KIB, Kind.INPUT), value("like", 3400, Kind.INPUT), value("made", 2 * KIB)
    norm = Node("lowtide.cudnn_batch_norm", (x, like), (made,))
    requests, blocks = requests_of(contents(Graph((x, like), (norm,), (made,)), workspace_bytes))
    assert requests == [MemoryRequest(3400, 0, 1), MemoryRequest(3400, 0, 1), MemoryRequest(2 * KIB, 0, -1)]
    assert blocks == spaces


def test_a_program_as_it_stands_is_run_until_it_settles():
    """Parameters of 2 MiB, a result of 3 MiB that is read by the next node, one of 5 MiB that outlives the step, 12 MiB of workspace."""
    lives = [
        (Kind.PARAMETER, 2 * MIB, 0, 3),
        (Kind.ACTIVATION, 3 * MIB, 0, 2),
        (Kind.ACTIVATION, 5 * MIB, 1, 3),
        (Kind.ACTIVATION, 0, 0, 3),
        (Kind.ACTIVATION, MIB, 2, 2),  # nobody ever has it
    ]
    allocated, reserved = eager_memory(lives, (0, 12 * MIB, 0))
    assert allocated == 22 * MIB
    assert reserved == 20 * MIB + 12 * MIB  # what is between 1 and 10 MiB shares a segment of 20


@pytest.mark.parametrize("settings", ["max_split_size_mb:64", "expandable_segments:True"])
def test_nothing_is_foretold_of_what_is_not_simulated(monkeypatch, settings):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    is_expandable = isinstance(simulated_allocator(), ExpandableAllocator)
    runs = [[MemoryRequest(MIB, 0, 1)]]
    assert (forecast._simulated([], runs) is None) != is_expandable
    assert forecast._simulated([], runs, copies_bytes=MIB) is None  # a graph's segments are the other allocator's


def test_an_allocator_that_keeps_nothing_is_not_simulated(monkeypatch):
    assert simulated_allocator() is not None
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert simulated_allocator() is None


def test_why_there_is_no_planned_allocator_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NativeError, match="made for CUDA under Linux"):
        native.load.__wrapped__(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(NativeError, match="PyTorch's allocator is cudaMallocAsync"):
        native.load.__wrapped__(tmp_path)


def test_headers_of_cuda_are_beside_torch_or_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "Path", lambda path: tmp_path / "usr")
    with pytest.raises(NativeError, match="install nvidia-cuda-runtime"):
        native._cuda(tmp_path / "torch")
    for place in ("usr/include", "nvidia/cu13/include"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "cuda_runtime_api.h").touch()
    assert native._cuda(tmp_path / "torch") == [tmp_path / "nvidia/cu13/include"]


def test_a_backward_pass_that_does_not_load_says_so(tmp_path: Path):
    (tmp_path / "absent.so").write_bytes(b"no library")
    with pytest.raises(NativeError, match="does not load"):
        absent._opened(tmp_path / "absent.so")
