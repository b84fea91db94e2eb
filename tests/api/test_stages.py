"""What is seen while a step is made: a line on a terminal, the log elsewhere; and the step and plan in one line."""

import logging
import re

import pytest
import torch

import lowtide
from bench.in_values import in_values
from lowtide.base import messages
from lowtide.base.messages import Stages
from lowtide.report import svg
from tests.api.networks import Gpt, adamw, next_token, workload

MAKE = workload(Gpt, lambda: (torch.randint(0, 50, (4, 32)),), next_token, adamw)


def _made(**settings):
    torch.manual_seed(0)
    model, batch, loss, optimizer = MAKE()
    search = lowtide.Sweep(levels=8, max_states=400)
    return lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(workspaces=False, search=search, **settings))


@pytest.fixture
def terminal(monkeypatch, tmp_path):
    """Standard error as a terminal; no search is remembered."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


def test_a_terminal_shows_stage_share_and_the_best_so_far_against_the_limit(terminal, capsys):
    step = _made(memory="80%", progress=True)
    shown = capsys.readouterr().err
    assert "lowtide: capturing the program" in shown
    assert re.search(r"lowtide: ordering \d+ operators: 100% done, best so far ", shown)
    limit_bytes = int(0.8 * step.plan.eager_peak_bytes)
    assert f"limit {limit_bytes / 2**20:.2f} MiB" in shown or f"limit {limit_bytes / 2**10:.2f} KiB" in shown


def test_elsewhere_nothing_is_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    _made(memory="80%")
    assert capsys.readouterr().err == ""


def test_what_takes_long_is_one_line_of_the_log(monkeypatch, caplog):
    now = iter([0.0, 4.9, 10.0, 15.6])
    monkeypatch.setattr(messages.time, "perf_counter", lambda: next(now))
    caplog.set_level(logging.INFO, logger="lowtide")
    told = Stages()
    for name, what in (("capture", "capturing the program"), ("order", "ordering 7 operators")):
        with told.stage(name, what):
            pass
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("lowtide", "ordering 7 operators took 6 s")]
    assert told.seconds == pytest.approx({"capture": 4.9, "order": 5.6})


def test_on_a_terminal_the_log_says_nothing(monkeypatch, caplog, terminal):
    monkeypatch.setattr(messages, "_LONG_S", -1.0)
    caplog.set_level(logging.INFO, logger="lowtide")
    with Stages(progress=True).stage("order", "ordering 7 operators"):
        pass
    assert not caplog.records


def test_a_callback_hears_of_each_stage_twice():
    heard = []
    step = _made(callback=heard.append)
    assert [(stage.name, stage.seconds is None) for stage in heard[::2]] == [(stage.name, True) for stage in heard[::2]]
    assert [stage.name for stage in heard[::2]] == [stage.name for stage in heard[1::2]]
    assert set(step.seconds) == {stage.name for stage in heard}


def test_step_and_plan_are_one_line_and_a_summary_in_notebooks():
    step = _made(memory="80%", progress=False)
    plan = step.plan
    assert repr(step) == f"Step(training, {repr(plan)[5:-1]})"
    assert repr(plan).startswith("Plan(peak ")
    assert "\n" not in repr(plan)
    slower = plan.cost_report.time_us / plan.cost_report.order_us - 1
    for part in ("in eager", f"time {slower:+.1%}", f"{len(plan.order)} operators"):
        assert part in repr(plan)
    html = plan._repr_html_()
    assert step._repr_html_() == svg(plan) + html
    assert html.startswith("<pre>")
    assert html.endswith("</pre>")
    assert "promised peak" in html
    assert html.count("<") == 2  # what is within is text


def test_a_step_without_training_says_so():
    fn = lowtide.optimize(torch.nn.Linear(4, 4), (torch.ones(2, 4),), planning=lowtide.Planning(workspaces=False))
    assert repr(fn).startswith("Step(inference, peak ")
