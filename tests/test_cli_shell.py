"""The command line among other programs: interrupts, closed pipes, the user's own prints and errors, files that cannot be written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from tests.specs import spec_module

SPEC = """
import os, sys
import torch
from torch import nn

print("imported")

def make():
    print("made")
    os.write(1, b"in C\\n")
    model = nn.Linear(4, 4)
    return model, torch.ones(2, 4), loss, torch.optim.SGD(model.parameters(), 0.1)

def loss(model, x):
    print("called")
    return model(x).sum()

def divides():
    return 1 / 0

def ends():
    sys.exit(3)

def needs():
    import no_such_library
"""


@pytest.fixture(autouse=True)
def _spec(tmp_path, monkeypatch):
    yield from spec_module("spec_of_a_shell", SPEC, tmp_path, monkeypatch)


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


def command(*arguments: object, program: str = "from lowtide.cli import main; main()") -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


def ended(*arguments: object, stdout: int) -> tuple[int, str]:
    done = subprocess.run(command(*arguments), stdout=stdout, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120)
    return done.returncode, done.stderr


IMPORTING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("importing", file=sys.stderr, flush=True)
            for _ in range(6000):
                time.sleep(0.1)  # a signal that comes right before a sleep is heard behind it

sys.meta_path.insert(0, Slow())
from lowtide.cli import main
main()
"""


@pytest.mark.parametrize(("verb", "name"), [("order", "numpy"), ("optimize", "torch")])
def test_an_interrupt_while_modules_are_imported_ends_it_without_a_word(verb: str, name: str):
    program = command(verb, "spec_of_a_shell:make", program=IMPORTING.format(name=name))
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        try:
            assert running.stderr is not None
            assert running.stderr.readline() == "importing\n"
            running.send_signal(signal.SIGINT)
            assert running.communicate(timeout=60) == ("", "")
        finally:
            running.kill()
    assert running.returncode == 130


@pytest.mark.parametrize("options", [[], ["--json", "-"], ["--json", "/dev/stdout"]])
def test_a_closed_pipe_ends_it_without_a_word(options: list[str]):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended("devices", "--no-measure", *options, stdout=writer) == (141, "")
    finally:
        os.close(writer)


def test_a_full_disk_behind_standard_output_is_told():
    with open("/dev/full", "w") as full:
        assert ended("devices", "--no-measure", "--json", "-", stdout=full.fileno()) == (
            2,
            "lowtide: standard output: No space left on device\n",
        )


def test_a_full_disk_is_told_by_answers_for_people_too():
    with open("/dev/full", "w") as full:
        assert ended("devices", "--no-measure", stdout=full.fileno()) == (2, "lowtide: standard output: No space left on device\n")


def test_a_standard_output_that_was_closed_before_is_told():
    closing = ["sh", "-c", '"$@" >&-', "sh", *command("devices", "--no-measure")]
    done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stderr) == (2, "lowtide: standard output: Bad file descriptor\n")


def test_a_terminal_without_columns_gets_its_answer():
    none = ENVIRONMENT | {"COLUMNS": "0"}
    done = subprocess.run(command("devices", "--no-measure"), capture_output=True, text=True, env=none, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h100" in done.stdout


STAYS_FULL = """
import errno, io, sys

class Full(io.RawIOBase):
    def writable(self):
        return True

    def fileno(self):
        return 1

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Full()))
from lowtide.cli import main
main()
"""


def test_a_disk_that_stays_full_is_told_once():
    program = command("devices", "--no-measure", "--json", "-", program=STAYS_FULL)
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stderr) == (2, "lowtide: standard output: No space left on device\n")


@pytest.mark.parametrize("verb", ["optimize", "explain"])
def test_what_the_users_code_prints_is_no_part_of_the_answer(verb: str, capfd: pytest.CaptureFixture[str]):
    simulate = ["--simulate"] if verb == "optimize" else []
    result = CliRunner().invoke(app, [verb, "spec_of_a_shell:make", "--device", "h100", *simulate, "--json", "-"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    assert {"imported", "made"} <= set(result.stderr.split())  # what a step prints is left to steps
    assert capfd.readouterr() == ("", "in C\n")


@pytest.mark.parametrize(
    "spec", [":", ":make", "spec_of_a_shell:", "../spec:make", "/tmp/spec:make", ".spec:make", "a b:c", "a:b:c", "a..b:c"]
)
@pytest.mark.parametrize("verb", ["optimize", "explain"])
def test_a_text_that_names_no_function_is_refused(verb: str, spec: str):
    result = CliRunner().invoke(app, [verb, spec])
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"lowtide: expected module:function, both as Python would import them, such as train:build or train.py:build; got {spec!r}\n"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("divides", r"lowtide: \S+:divides: ZeroDivisionError: division by zero\n  \S+spec_of_a_shell.py:\d+, in divides: return 1 / 0\n"),
        ("ends", r"lowtide: \S+:ends: expected code that returns, .* exit code 3\n  \S+spec_of_a_shell.py:\d+, in ends: sys.exit\(3\)\n"),
        ("needs", r"lowtide: .*: ModuleNotFoundError: No module named 'no_such_library'\n  \S+.py:\d+, in needs: import no_such_library\n"),
    ],
)
def test_an_error_of_the_users_is_told_with_its_line(function: str, message: str):
    result = CliRunner().invoke(app, ["optimize", f"spec_of_a_shell:{function}"])
    assert result.exit_code == 2, result.output
    assert re.fullmatch(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"lowtide: broken_spec:make: ZeroDivisionError: division by zero\n  \S+broken_spec.py:1, in <module>: 1 / 0\n"),
        ("def make(:", r"lowtide: broken_spec:make: SyntaxError: .*\n  \S+broken_spec.py:1: def make\(:\n"),
        (
            "import no_such_library",
            r"lowtide: broken_spec:make: ModuleNotFoundError: .*\n  \S+broken_spec.py:1, in <module>: import no_such_library\n",
        ),
        ("raise SystemExit(7)", r"lowtide: broken_spec:make: expected code that returns, .* exit code 7\n  .*\n"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(text: str, message: str, tmp_path: Path):
    (tmp_path / "broken_spec.py").write_text(text)
    result = CliRunner().invoke(app, ["explain", "broken_spec:make"])
    sys.modules.pop("broken_spec", None)
    assert result.exit_code == 2, result.output
    assert re.fullmatch(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("optimize", ["--save", "none/plan.json"], "--save none/plan.json: expected a file in a folder that exists"),
        ("optimize", ["--program", "."], "--program .: expected a file, got a folder"),
        ("optimize", ["--save", "a", "--json", "a"], "--json a: expected another file than that of --save"),
        ("optimize", ["--json", "dangling"], "--json dangling: expected a file that can be written: No such file or directory"),
        ("explain", ["--json", "none/out.json"], "--json none/out.json: expected a file in a folder that exists"),
        ("devices", ["--json", "none/out.json"], "--json none/out.json: expected a file in a folder that exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(verb: str, options: list[str], message: str, tmp_path: Path):
    (tmp_path / "dangling").symlink_to("none/out.json")
    spec = [] if verb == "devices" else ["spec_of_a_shell:make"]
    result = CliRunner().invoke(app, [verb, *spec, *options])
    assert result.exit_code == 2, result.output
    assert "imported" not in result.output
    assert result.stderr.startswith(f"lowtide: {message}")
    assert result.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"spec_of_a_shell.py", "dangling", "cache"}


def test_the_answer_goes_into_a_device_and_leaves_it_one():
    result = CliRunner().invoke(app, ["devices", "--no-measure", "--json", "/dev/null"])
    assert result.exit_code == 0, result.output
    assert Path("/dev/null").is_char_device()
