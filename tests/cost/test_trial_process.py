"""Operators are tried in a process of their own, which may crash, hang or say what it likes."""

import importlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

import tests.untrusted  # noqa: F401  (defines operators)
from lowtide.cost import trial_process, trials
from lowtide.cost import trial_process as apart
from lowtide.cost.laboratory import Call, Laboratory
from lowtide.cost.workspaces import measure_workspaces
from lowtide.ir.graph import Kind, Node, Storage, Value


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


def value(*shape, dtype="float32"):
    count = 1
    for extent in shape:
        count *= extent
    stride = torch.empty(shape, device="meta").stride()
    size = getattr(torch, dtype).itemsize
    return Value("v", Storage("v", size * count, "cpu", Kind.ACTIVATION), dtype, shape, stride)


def call(op, *shape):
    return Node(op, (value(*shape),), (value(*shape),))


MINE = "lowtide_tests.{}.default"
FINE = call("aten.relu.default", 5)


def test_what_crashes_is_unknown_and_told_and_the_rest_is_measured():
    with pytest.warns(RuntimeWarning, match=r"cannot measure lowtide_tests\.crash.*SIGSEGV.*, and 1 more.*fake kernels") as told:
        found = measure_workspaces([call("aten.neg.default", 3), call(MINE.format("crash"), 3), FINE, call(MINE.format("crash"), 4)])
    assert len(told) == 1
    assert (found.measured_calls, found.unknown_nodes) == (2, 2)
    assert all(unknown.ended for unknown in found.unknown)


def test_what_hangs_is_unknown_and_told_and_the_rest_is_measured(monkeypatch):
    measure_workspaces([FINE])  # so that the limit is the call's, not the start's
    monkeypatch.setattr(trials, "LIMIT_S", 4.0)
    with pytest.warns(RuntimeWarning, match=r"cannot measure lowtide_tests\.hang.*did not come back within 4 s"):
        found = measure_workspaces([call(MINE.format("hang"), 3), call("aten.neg.default", 3)])
    assert (found.measured_calls, found.unknown_nodes) == (1, 1)


def test_a_call_that_failed_is_not_tried_again_while_the_laboratory_is_open():
    one = Call(call(MINE.format("crash"), 3))
    laboratory = Laboratory()
    assert laboratory.level_bytes(one) is None
    before = laboratory._trials._ends
    assert laboratory.results(one) is None
    assert laboratory.times_ns([one], warm_up=True) == [None]
    assert laboratory._trials._ends == before
    with pytest.warns(RuntimeWarning, match="cannot measure"):
        laboratory.__exit__()


def test_what_an_operator_prints_mixes_with_nothing():
    found = measure_workspaces([call(MINE.format("chatter"), 1024), FINE])
    assert (found.nbytes, found.unknown) == ((0, 0), ())


def test_an_operator_that_nothing_importable_defines_is_unknown_and_says_so():
    library = torch.library.Library("lowtide_here", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x.clone(), "CPU")
    found = measure_workspaces([call("lowtide_here.f.default", 3), FINE])
    assert found.unknown_nodes == 1
    assert "finds nothing to import that does" in found.unknown[0].reason


def test_a_process_that_cannot_be_started_is_told_once(monkeypatch):
    trial_process.end()

    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot measure aten\.relu.*cannot be started.*no more processes.*, and 1 more") as told:
        found = measure_workspaces([FINE, call("aten.neg.default", 3)])
    assert len(told) == 1
    assert found.unknown_nodes == 2


def test_a_python_that_does_not_find_torch_is_told(monkeypatch, tmp_path):
    trial_process.end()
    (tmp_path / "lowtide").mkdir()
    (tmp_path / "lowtide" / "__init__.py").write_text("raise ImportError('not this one')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.warns(RuntimeWarning, match="not this one"):
        assert measure_workspaces([FINE]).unknown_nodes == 1


def test_the_folder_that_one_is_in_is_no_place_to_import_from(monkeypatch, tmp_path):
    trial_process.end()
    (tmp_path / "json.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert measure_workspaces([FINE], remember=False).unknown == ()


def test_what_keeps_python_from_its_surroundings_keeps_the_process_from_them():
    asked = f"import sys; sys.path.append({os.getcwd()!r}); from lowtide.cost import trial_process as apart; print(*apart._flags())"
    told = [subprocess.run([sys.executable, *given, "-c", asked], capture_output=True, text=True).stdout.split() for given in (["-I"], [])]
    assert "-I" in told[0]
    assert "-I" not in told[1]


def test_what_is_no_text_on_the_path_is_skipped_as_python_skips_it(monkeypatch, tmp_path):
    trial_process.end()
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    assert measure_workspaces([FINE], remember=False).unknown == ()


def test_a_path_that_has_changed_needs_no_other_process(monkeypatch, tmp_path):
    measure_workspaces([FINE], remember=False)
    monkeypatch.setattr(apart, "_started", lambda: pytest.fail("another process"))
    (tmp_path / "operators_found_later.py").write_text(
        "import torch\n\n"
        "@torch.library.custom_op('lowtide_tests::found_later', mutates_args=())\n"
        "def found_later(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x + 1\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.import_module("operators_found_later")
    assert measure_workspaces([call(MINE.format("found_later"), 3)], remember=False).unknown == ()


def test_where_there_are_no_more_threads_the_process_ends_and_that_is_told(monkeypatch):
    trial_process.end()
    started = []
    real = apart._started

    def refuse(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(apart, "_started", lambda: started.append(real()) or started[-1])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot measure aten\.relu.*nobody can listen to it \(can't start new thread\)"):
        assert measure_workspaces([FINE], remember=False).unknown_nodes == 1
    assert [process.returncode is not None for process in started] == [True]


def test_an_idle_process_that_no_thread_can_end_later_is_kept(monkeypatch):
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    assert measure_workspaces([FINE], remember=False).unknown == ()
    assert len(trial_process._idle) == 1


def test_a_process_that_keeps_ending_is_given_up(monkeypatch):
    monkeypatch.setattr(trials, "_MOST_ENDS", 1)
    nodes = [call(MINE.format("crash"), n) for n in range(1, 6)]
    started = []
    real = apart._started
    monkeypatch.setattr(apart, "_started", lambda: started.append(1) or real())
    with pytest.warns(RuntimeWarning, match="cannot measure"):
        assert measure_workspaces(nodes).unknown_nodes == 5
    assert len(started) <= 2


def test_the_process_works_under_the_same_settings():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    full = Node("aten.full.default", ((4096,), 1.0), (value(4096, dtype="float64"),))
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        with Laboratory() as laboratory:
            (made,) = laboratory.results(Call(full))
        assert made.dtype == "float64"
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    with Laboratory() as laboratory:
        (made,) = laboratory.results(Call(full))
    assert made.dtype == "float32"


def test_gradients_are_as_the_program_has_them():
    x, weight, hidden = value(5, 4, 8), value(32, 8), value(4, 8)
    rest = (value(32), value(32), hidden, hidden, False, (), 2, 8, 1, True, False, False)
    for gradients, expected in ((True, True), (False, False)):
        node = Node("aten.mkldnn_rnn_layer.default", (x, weight, weight, *rest, gradients), ())
        with Laboratory(gradients=gradients) as laboratory:
            results = laboratory.results(Call(node))
        assert (len(results) == 4 and results[3] is not None and results[3].nbytes > 0) == expected


def test_what_one_operator_leaves_for_another_is_made_by_it():
    """A workspace of bytes is never made up; what made-up data crashes is tried again on what its makers make."""
    x, out, secret, grad = value(6), value(6), value(9), value(6)
    pack = Node(MINE.format("pack"), (x,), (out, secret))
    unpack = Node(MINE.format("unpack"), (out, secret), (grad,))
    found = measure_workspaces([pack, unpack])
    assert found.unknown == ()
    assert found.measured_calls == 2


def test_the_idle_process_serves_the_next_and_ends_by_itself(monkeypatch):
    measure_workspaces([FINE], remember=False)
    process = trial_process._idle[0][0]._process
    measure_workspaces([FINE], remember=False)
    assert trial_process._idle[0][0]._process is process
    monkeypatch.setattr(trial_process, "IDLE_S", 0.05)
    measure_workspaces([FINE], remember=False)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is not None
    assert not trial_process._idle


def test_an_interrupt_ends_the_process_and_passes_through(monkeypatch):
    measure_workspaces([FINE], remember=False)
    process = trial_process._idle[0][0]._process

    def interrupted(self: apart.TrialProcess, request: object, limit_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(apart.TrialProcess, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_workspaces([call("aten.neg.default", 31)], remember=False)
    assert process.poll() is not None
    assert measure_workspaces([FINE], remember=False).unknown == ()


def test_one_that_nobody_waits_for_becomes_ready_by_itself():
    process = apart.TrialProcess({}, waits=False)
    try:
        assert "ready" in process._lines.get(timeout=300)
    finally:
        process.end()


def test_two_threads_have_a_process_each():
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(measure_workspaces([call("aten.neg.default", n)], remember=False).measured_calls))
        for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1]


SCRIPT = """
    import sys, torch
    from torch import nn
    import lowtide
    print("main ran")
    model = nn.LSTM(4, 8)
    step = lowtide.optimize(
        model, (torch.ones(3, 2, 4),), loss=lambda m, x: m(x)[0].sum(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        {settings}
    )
    print(float(step(torch.ones(3, 2, 4))) != 0)
"""


def test_a_script_without_a_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(settings="")))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "main ran\nTrue\n", "")


def test_nothing_is_started_where_all_is_remembered(monkeypatch):
    measure_workspaces([FINE])
    trial_process.end()

    def refuse(*args):
        raise AssertionError("started")

    monkeypatch.setattr(trials.Trials, "_started", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_workspaces([FINE]).measured_calls == 0


def test_the_process_imports_no_compiler():
    """What asks for inductor does so unseen, and takes a second."""
    code = (
        "import sys; from lowtide.cost import trial, trial_process, trials; trial_process._warm_up(); "
        "trial_process._apply({**trials._settings(), 'circumstances': list(trial.circumstances('cpu', True))}, True, 'cpu'); "
        "sys.exit('torch._inductor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
