"""Lengths and batches of the bench on varying lengths: in their range, the same each time, padded so that padding does not count."""

import random

import torch

from bench.dynamic.lengths import HISTOGRAM, LONGEST, SHORTEST, batches, bucket, drawn, shapes
from bench.dynamic.paper import instead_of_equal_graphs
from bench.dynamic.task import IGNORED, Task, padded
from bench.dynamic.variants import VARIANTS
from lowtide.planning import machine


def test_lengths_are_of_the_histogram():
    assert sum(samples for _, _, samples in HISTOGRAM) == 1000
    found = drawn(20_000, random.Random(1))
    assert min(found) >= SHORTEST
    assert max(found) <= LONGEST
    short = sum(length < 400 // 6 for length in found) / len(found)
    assert abs(short - 0.445) < 0.02


def test_batches_are_the_same_again_and_the_last_is_of_the_longest():
    lengths = batches(5, 8)
    assert lengths == batches(5, 8) != batches(5, 8, seed=1)
    assert shapes(lengths)[-1] == LONGEST


def test_buckets_are_powers_of_two_and_end_at_the_longest():
    assert [bucket(length) for length in (1, 2, 17, 64, 65, 257, LONGEST)] == [1, 2, 32, 64, 128, LONGEST, LONGEST]


def test_padding_is_on_the_right_and_does_not_count():
    batch = padded(torch.full((2, 4), 7), [4, 2])
    assert batch["input_ids"].tolist() == [[7, 7, 7, 7], [7, 7, 0, 0]]
    assert batch["labels"].tolist() == [[7, 7, 7, 7], [7, 7, IGNORED, IGNORED]]


def test_a_padded_batch_has_the_same_tokens():
    task = Task(4, 3)
    short, long = task.batch(1), task.batch(1, bucket(max(task.lengths[1])))
    counted = [int((each["labels"] != IGNORED).sum()) for each in (short, long)]
    assert counted == [sum(task.lengths[1])] * 2
    assert torch.equal(long["input_ids"][:, : short["input_ids"].shape[1]], short["input_ids"])
    assert task.heaviest() == 2
    assert task.tokens == sum(map(sum, task.lengths))


def test_other_graphs_are_planned_only_for_a_while():
    before = machine.equal_graphs
    with instead_of_equal_graphs(len):
        assert machine.equal_graphs is len
    assert machine.equal_graphs is before
    assert len(VARIANTS) == 6
