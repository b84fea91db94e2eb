"""What goes wrong while a program is captured, told as a CaptureError: what was raised, by which operator, on which line, what to do."""

from __future__ import annotations

import dis
import logging
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from lowtide.capture.calls import NESTED
from lowtide.capture.care.turns import undoing
from lowtide.capture.sizes.symbols import TAKES_NUMBERS, with_names
from lowtide.capture.sources import is_library, line_of, users_line
from lowtide.errors import CaptureError, LowtideError

_MARK = "_lowtide_operator"  # on an exception: the operator that raised it, and where it was called
_AS_EAGER = "_lowtide_as_eager"  # on an exception that an operator raised on real data
_LONGEST_TEXT = 600  # characters of an exception's own words; torch's can go on for pages
_IN_A_RANGE = (
    "with `dynamic` this has to be right for every batch of the range: take sizes from the shapes of tensors, not from numbers that the "
    "example happens to have, or leave the dimension out"
)
_OF_CPP = "\nException raised from "  # what follows is a stack of addresses
_NUMBERS_ALONE = re.compile("Sym(Int|Float|Bool)|symbolic (sizes|strides|integers)")  # torch's words where a size is no number
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
_NO_DATA = "data is not allocated yet"  # what torch says of a fake tensor of which a constructor wants the numbers
_TWICE = (
    "goes through the graph a second time: a step does the backward pass and the optimizer's step by itself, so `loss` returns the loss "
    "and calls no backward()"
)
_STACK = "torch.tensor(...) of tensors reads their numbers, and a capture has shapes only: torch.stack(...) makes the same of them"
_BY_TEXT = (  # torch's own words for what no capture can follow, and what that is
    (
        "found no compiled frames",
        "compiles a part of itself (as flex_attention does), which cannot be while it is captured: use what it computes as plain operators "
        "(functional.scaled_dot_product_attention with attn_mask=)",
    ),
    (
        "already associated to a python object of type FakeTensor",
        "makes a tensor of a class of its own out of another one, which no capture can follow: make it before the step",
    ),
    ("shape_env must not be None", NESTED),
    ("NestedTensor", NESTED),
)
_WHAT_TO_DO = (
    "where plain PyTorch raises this too, the program is at fault; where it does not, the program wants data here, and a capture "
    "has shapes only: compute this before the step and pass it in the batch"
)


def mark_as_eager(error: Exception) -> None:
    """Note on an exception that an operator raised it on real data, as it does without a capture."""
    setattr(error, _AS_EAGER, True)


def programs_own(error: CaptureError) -> Exception | None:
    """The exception that the program itself raised, as it would without a capture; None where the capture may be what it failed for.

    Its own are those of a `raise` or an `assert`, and what an operator raises on real data.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or (hasattr(cause, _MARK) and not hasattr(cause, _AS_EAGER)):
        return None
    return cause if hasattr(cause, _AS_EAGER) or _by_statement(cause.__traceback__) else None


def is_users_own(error: CaptureError) -> bool:
    """Whether it tells of a `raise` or an `assert` in a line of the user's own, or of a key or index that is missing there."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, LowtideError) or hasattr(cause, _MARK) or cause.__traceback__ is None:
        return False
    *_, (frame, _line) = traceback.walk_tb(cause.__traceback__)
    return not is_library(frame.f_code.co_filename) and (isinstance(cause, LookupError) or _by_statement(cause.__traceback__))


def _by_statement(trace: TracebackType | None) -> bool:
    """Whether an exception began with a statement of Python, not within a call of C."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def mark(error: Exception, operator: str) -> None:
    """Note on an exception which operator raised it and where that was called."""
    if not hasattr(error, _MARK):
        setattr(error, _MARK, (operator, users_line()))


@contextmanager
def no_tracebacks_logged() -> Iterator[None]:
    """Keep torch from writing to standard error what an operator or a size failed for, on this thread: the error tells it."""
    thread = threading.get_ident()

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != thread

    with undoing() as undo:
        for name in _LOGGERS:
            undo(partial(logging.getLogger(name).removeFilter, is_anothers))
            logging.getLogger(name).addFilter(is_anothers)
        yield


@contextmanager
def raised_in(called: str) -> Iterator[None]:
    """Raise CaptureError for whatever is raised inside but lowtide's own errors; `called` is what runs, as in "loss(model, ...)"."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:  # users' code and torch may raise anything: it is told with operator and line, and is the cause
        if _is_of_an_interrupt(error):
            raise KeyboardInterrupt from error
        raise CaptureError(_sentence(error, called)) from error


def _is_of_an_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C came before, and torch failed to leave a mode that it had then entered by half."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def _sentence(error: Exception, called: str) -> str:
    text = _text_of(error)
    raised = f"raised {type(error).__name__}: {with_names(text)}"
    operator, line = getattr(error, _MARK, ("", ""))
    what_to_do = TAKES_NUMBERS if _NUMBERS_ALONE.search(text) else _WHAT_TO_DO
    known = next((words for part, words in _BY_TEXT if part in text), None)
    if operator and known is None:
        if what_to_do is _WHAT_TO_DO and with_names(text) != text:
            what_to_do = _IN_A_RANGE
        return f"{called} failed in operator {operator} at {line}, which {raised}; {what_to_do}"
    line = line or line_of(error)
    if known is not None:
        return f"{called} {known}, at {line or 'an unknown line'}"
    if "backward through the graph a second time" in text:
        return f"{called} {_TWICE}"
    if _NO_DATA in text:
        return f"{called} wants the numbers of tensors at {line or 'an unknown line'}; {_STACK}"
    if not line and isinstance(error, TypeError) and "argument" in str(error):
        return (
            f"{called} cannot be called with this batch, it {raised}; a tuple or list is passed on as positional arguments, a mapping as "
            "keyword arguments, anything else as the one argument"
        )
    return f"{called} {raised}, at {line or 'an unknown line'}; {what_to_do}"


def _text_of(error: Exception) -> str:
    text = " ".join(str(error).partition(_OF_CPP)[0].split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
