"""Tells when something of torch moved that lowtide uses and torch does not promise to keep."""

import importlib

import pytest
import torch

from tests.imports import Mention, in_package, is_private, names

pytestmark = pytest.mark.xdist_group("source")  # one process parses all files, once


def test_torch_still_has_what_is_used():
    used = [mention for mention in in_package(names, "torch") if mention.name.split(".")[0] == "torch" and is_private(mention.name)]
    missing = {name for name in {mention.name for mention in used} if not found(name)}
    assert len(used) > 100
    assert [str(mention) for mention in used if mention.name in missing] == [], f"torch {torch.__version__} has no such name any more"


def test_the_search_sees_private_names():
    source = "import torch\nfrom torch._ops import OpOverload as O\nfrom torch import nn\ntorch._C._x().y\nnn.Linear._z"
    private = {mention for mention in names(source, "f.py") if is_private(mention.name)}
    assert private == {
        Mention("f.py", 2, "torch._ops.OpOverload"),
        Mention("f.py", 4, "torch._C._x"),
        Mention("f.py", 5, "torch.nn.Linear._z"),
    }


def test_a_name_that_moved_is_missed():
    assert found("torch._C._get_tracing_state")
    assert not found("torch._C._no_such_thing")
    assert not found("torch._no_such_module.thing")


def found(name: str) -> bool:
    """Whether a dotted name still leads somewhere: modules as far as they go, attributes from there."""
    parts = name.split(".")
    thing = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part) and not _is_module(".".join(parts[:depth])):
            return False
        thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(".".join(parts[:depth]))
    return True


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True
