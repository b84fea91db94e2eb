"""The sweep over foreign architectures: what it tries, and what it says of one."""

from collections import Counter

import torch

from bench.coverage.__main__ import summary
from bench.coverage.subjects import SUBJECTS
from bench.coverage.trial import trial


def test_that_enough_architectures_of_each_library_are_tried():
    assert max(Counter(subject.name for subject in SUBJECTS).values()) == 1
    libraries = Counter(subject.library for subject in SUBJECTS)
    assert libraries.keys() >= {"transformers", "timm", "torchvision", "torch.nn"}  # and others that are installed
    assert libraries.total() >= 120


def test_that_a_trial_compares_training_and_inference():
    found = trial(next(subject for subject in SUBJECTS if subject.name == "torch.nn/gru"))
    assert (found["training"], found["inference"]) == ("right", "right"), found


def test_that_a_difference_is_seen(monkeypatch):
    subject = next(subject for subject in SUBJECTS if subject.name == "torch.nn/bilinear")
    monkeypatch.setattr("bench.coverage.trial._eager_step", lambda *_: torch.tensor(0.0))
    found = trial(subject)
    assert found["training"] == "different"
    assert "loss 0" in found["why"]


def test_that_the_summary_counts_what_eager_can_do():
    rows = [{"training": verdict, "inference": "right"} for verdict in ("right", "refused", "not in eager", "eager differs")]
    assert summary(rows)[0].startswith("training: 2 of 3 that eager can (66.7%)")
