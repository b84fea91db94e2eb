"""Copies to the host and back: who waits for whom, in which order, and what becomes of the buffers."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import torch

from lowtide.runtime import copies, program
from lowtide.runtime.copies import CudaStreams, DirectMemory, StreamedMemory, TensorLayout, host_memory
from lowtide.runtime.program import Program
from tests.swapping import LateStreams, idle_bytes


@pytest.fixture
def machine():
    return LateStreams()


@pytest.fixture(params=["direct", "streamed"])
def memory(request, machine):
    return DirectMemory() if request.param == "direct" else StreamedMemory(machine)


LAID_OUT = {
    "dense": lambda: torch.arange(12.0).reshape(3, 4),
    "strided with an offset": lambda: torch.arange(40.0)[3:33].view(5, 6)[:, 1:4:2],
    "channels last": lambda: torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "bfloat16": lambda: torch.arange(7).bfloat16(),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "number": lambda: torch.tensor(2.5),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_comes_back_is_the_same_on_a_storage_of_its_own(name, memory):
    tensor = LAID_OUT[name]()
    expected, look = tensor.clone(), TensorLayout.of(tensor)
    with memory.transfers() as transfers:
        copy = transfers.store(tensor)
        transfers.drop(tensor, copy)
        tensor.untyped_storage().fill_(0)
        back, twice = transfers.load(copy), transfers.load(copy)
        del copy
        for each in (back, twice):
            transfers.arrived(each)
            assert torch.equal(each, expected)
            assert TensorLayout.of(each) == look
    assert len({each.untyped_storage().data_ptr() for each in (tensor, back, twice)}) == 3


@pytest.mark.parametrize("name", ["dense", "strided with an offset", "channels last", "bfloat16", "number"])
def test_what_is_lent_is_the_callers_own_again(name, memory):
    tensor = LAID_OUT[name]()
    expected, storage = tensor.clone(), tensor.untyped_storage()
    other = torch.empty(0, dtype=torch.uint8).set_(storage)  # all of it, as the caller may look at it, too
    whole = other.clone()
    with memory.transfers() as transfers:
        copy = transfers.store(tensor)
        for _ in range(2):
            transfers.empty(tensor, copy)
            assert storage.nbytes() == 0
            assert transfers.refill(tensor, copy) is tensor
            transfers.arrived(tensor)
            assert torch.equal(tensor, expected)
    assert torch.equal(other, whole)


def test_what_is_lent_is_given_back_where_a_run_fails(memory):
    first, second = torch.arange(8.0), torch.arange(4.0)

    def run():
        with memory.transfers() as transfers:
            copies = [transfers.store(each) for each in (first, second)]
            for tensor, copy in zip((first, second), copies, strict=True):
                transfers.empty(tensor, copy)
            transfers.refill(second, copies[1])
            raise KeyError("as told")

    with pytest.raises(KeyError, match="as told"):
        run()
    assert first.tolist() == list(range(8))
    assert second.tolist() == list(range(4))


def test_who_waits_for_whom(machine):
    with StreamedMemory(machine).transfers() as transfers:
        tensor = torch.ones(8)
        copy = transfers.store(tensor)
        assert machine.log == [("compute", "record"), ("to host", "wait", "compute"), ("to host", "copy"), ("to host", "record")]
        machine.log.clear()
        transfers.drop(tensor, copy)
        assert machine.log == [("compute", "wait", "to host")]
        machine.log.clear()
        back = transfers.load(copy)
        assert machine.log == [
            ("compute", "record"), ("from host", "wait", "compute"), ("from host", "wait", "to host"),
            ("from host", "copy"), ("from host", "record"),
        ]  # fmt: skip
        machine.log.clear()
        transfers.arrived(back)
        assert machine.log == [("compute", "wait", "from host")]
        machine.log.clear()
    assert [entry for entry in machine.log if entry[0] == "compute"] == [("compute", "wait", "to host"), ("compute", "wait", "from host")]


def test_nothing_is_copied_before_somebody_waits_and_the_source_is_not_held_on_to(machine):
    with StreamedMemory(machine).transfers() as transfers:
        tensor = torch.ones(8)
        copy = transfers.store(tensor)
        assert machine.copied_bytes == 0
        del tensor  # as a program never does before its drop
        with pytest.raises(AssertionError, match="freed before the copy of it was done"):
            transfers.drop(torch.ones(8), copy)


def test_a_buffer_is_not_written_before_its_last_load_is_done(machine):
    with StreamedMemory(machine).transfers() as transfers:
        first, second = torch.ones(8), torch.zeros(8)
        copy = transfers.store(first)
        transfers.drop(first, copy)
        back = transfers.load(copy)
        del copy
        other = transfers.store(second)  # in the same buffer
        assert machine.pinned_bytes == 32
        transfers.drop(second, other)
        transfers.arrived(back)
        assert back.tolist() == [1.0] * 8


def test_a_buffer_is_kept_for_whatever_is_about_as_large(machine):
    memory = StreamedMemory(machine)
    for count in (9, 16, 12, 8, 17):  # 36, 64, 48, 32 and 68 bytes
        with memory.transfers() as transfers:
            tensor = torch.ones(count)
            copy = transfers.store(tensor)
            assert idle_bytes(memory) == machine.pinned_bytes - copy.buffer.memory.numel()
            transfers.drop(tensor, copy)
            del copy
    assert machine.pinned_bytes == idle_bytes(memory) == 64 + 32 + 128


def test_two_copies_at_a_time_have_two_buffers(machine):
    with StreamedMemory(machine).transfers() as transfers:
        ones, twos = torch.ones(8), torch.full((8,), 2.0)
        copies = [transfers.store(each) for each in (ones, twos)]
        for each, copy in zip((ones, twos), copies, strict=True):
            transfers.drop(each, copy)
        loaded = [transfers.load(copy) for copy in copies]
        for each in loaded:
            transfers.arrived(each)
        assert [each[0].item() for each in loaded] == [1.0, 2.0]


def test_a_run_that_fails_leaves_no_copy_under_way_and_no_buffer_behind(machine):
    memory = StreamedMemory(machine)
    tensor = torch.ones(8)

    def run():
        with memory.transfers() as transfers:
            copy = transfers.store(tensor)
            back = transfers.load(copy)
            assert back.shape == (8,)
            raise KeyError("as told")

    with pytest.raises(KeyError, match="as told"):
        run()
    gc.collect()  # the frames that the error held
    assert machine.copied_bytes == 64
    assert not any(stream.work for stream in machine.made)
    assert idle_bytes(memory) == 32


def test_no_memory_for_a_buffer_is_the_callers_to_know(machine, monkeypatch):
    def refuse(nbytes):
        raise RuntimeError(f"no {nbytes} bytes")

    monkeypatch.setattr(machine, "pinned", refuse)
    with pytest.raises(RuntimeError, match="no 32 bytes"), StreamedMemory(machine).transfers() as transfers:
        transfers.store(torch.ones(8))


def test_copies_share_the_two_streams_over_all_runs(machine):
    memory = StreamedMemory(machine)
    for _ in range(3):
        with memory.transfers():
            pass
    assert [stream.name for stream in machine.made] == ["to host", "from host"]


def test_programs_on_a_cuda_device_share_its_host_memory():
    one = host_memory("cuda:1")
    assert isinstance(one, StreamedMemory)
    assert host_memory("cuda:1") is one
    assert host_memory("cuda:0") is not one
    assert isinstance(host_memory("cpu"), DirectMemory)
    del one
    gc.collect()
    assert "cuda:1" not in copies._known


def test_what_is_asked_of_cuda(monkeypatch):
    """Names and arguments only: the rest is for a machine that has one."""
    asked = []
    current = contextlib.nullcontext("copying")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(("current", device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: asked.append(("new", device)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: (asked.append(("on", stream)), current)[1])
    streams = CudaStreams(torch.device("cuda:1"))
    streams.computing()
    streams.copying()
    target = torch.zeros(4, dtype=torch.uint8)
    streams.copy("copying", target, torch.ones(4, dtype=torch.uint8))
    assert asked == [("current", streams.device), ("new", streams.device), ("on", "copying")]
    assert target.tolist() == [1] * 4


def test_a_run_takes_as_many_buffers_of_each_size_as_it_has_at_once(machine):
    memory = StreamedMemory(machine)
    for turns in (3, 1):
        with memory.transfers() as transfers:
            for _ in range(turns):
                tensors = [torch.zeros(elements) for elements in (4, 4, 5)]  # 16, 16 and 32 bytes
                at_once = [transfers.store(tensor) for tensor in tensors]
                for tensor, copy in zip(tensors, at_once, strict=True):
                    transfers.drop(tensor, copy)
                del at_once, copy
        assert memory.taken_bytes == memory.pinned_bytes == idle_bytes(memory) == machine.pinned_bytes == 64


def test_what_others_have_left_goes_where_a_limit_has_no_room_for_it(machine):
    memory = StreamedMemory(machine)
    for elements, most_bytes, pinned_bytes in ((8, None, 32), (4, None, 48), (2, 40, 24), (2, 8, 24), (16, 64, 64)):
        with memory.transfers(most_bytes) as transfers:
            tensor = torch.zeros(elements)
            transfers.drop(tensor, transfers.store(tensor))
        assert memory.taken_bytes == 4 * elements
        assert memory.pinned_bytes == idle_bytes(memory) == pinned_bytes
    assert machine.log.count(("let go",)) == 2


_PROGRAM = """
def step(inputs, host):
    x, home = inputs
    copy = host.store(x)
    host.drop(x, copy)
    state = host.fetch(home, x.device)
    back = host.load(copy)
    host.arrived(state)
    state.add_(1)
    host.save(state, home)
    sent = host.send(state)
    host.saved(state)
    host.arrived(back)
    return [sent]
"""


class _Interrupt:
    """Raises KeyboardInterrupt the nth time that Python may: where a function of the package is called, and where one of C has returned."""

    def __init__(self, left):
        self.left, self.came = left, False

    def __call__(self, frame, event, argument):
        files = copies.__file__, program.__file__
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith((*files, "<lowtide step")):
            return
        self.left -= 1
        if self.left < 0 and frame.f_code.co_name not in ("__del__", "give_back"):  # a finalizer's errors are nobody's
            self.came = True
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_any_moment_leaves_no_copy_under_way(fails):
    """What the host reads is whole, whenever that comes; and so where it comes while a run is ended that failed."""
    at, came = 0, True
    source = _PROGRAM.replace("return [sent]", "raise ValueError") if fails else _PROGRAM
    while came:
        machine, x, home = LateStreams(), torch.ones(8), torch.ones(8)
        run, interrupt = Program(source, host=StreamedMemory(machine)), _Interrupt(at)
        sys.setprofile(interrupt)
        try:
            run([x, home])
        except (KeyboardInterrupt, ValueError):
            pass
        finally:
            sys.setprofile(None)
        came, at = interrupt.came, at + 1
        assert not any(stream.work for stream in machine.made), at
        assert home.tolist() in ([1.0] * 8, [2.0] * 8)
    assert at > 50
    assert home.tolist() == [2.0] * 8


class _InterruptAtLine:
    """Raises KeyboardInterrupt at the nth line of what empties and fills."""

    def __init__(self, left):
        self.left, self.came = left, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name not in ("empty", "refill", "_filled", "_after_computing"):
            return None
        self.left -= event == "line"
        if self.left < 0:
            self.came = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_what_is_lent_whole():
    """Between the line that empties a parameter and the one that knows of it, too."""
    at, came = 0, True
    while came:
        tensor, interrupt = torch.arange(4.0), _InterruptAtLine(at)
        try:
            with StreamedMemory(LateStreams()).transfers() as transfers:
                copy = transfers.store(tensor)
                sys.settrace(interrupt)
                transfers.empty(tensor, copy)
                transfers.refill(tensor, copy)
                sys.settrace(None)
                transfers.arrived(tensor)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        came, at = interrupt.came, at + 1
        assert tensor.untyped_storage().nbytes() == 16
        if came:
            assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0], at
    assert at > 10
