import math

import pytest
import torch

from bench.models.btlm import BTLM, Shape, causal_alibi, next_token_loss, slopes
from bench.models.explicit import BTLM_3

TINY = Shape(layers=2, width=32, heads=4, inner=48, vocabulary=50)


def test_it_has_the_parameters_of_its_paper():
    """2.6 billion; by the published configuration, whose output layer is the embedding: one matrix of it, 32 blocks, one norm."""
    width, inner = 2560, 6826
    attention = 3 * width * width + 3 * width + width * width + width
    block = attention + 2 * (width * inner + inner) + inner * width + width + 2 * 2 * width
    expected = 50_257 * width + 32 * block + 2 * width
    work = BTLM_3.build(2, "meta")
    assert sum(parameter.numel() for parameter in work.model.parameters()) == expected == 2_646_255_744
    assert {parameter.dtype for parameter in work.model.parameters()} == {torch.bfloat16}
    assert work.batch[0].shape == (2, 512)


def test_slopes_are_those_of_alibis_paper():
    assert slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert torch.allclose(slopes(16)[::2], torch.tensor([2 ** (-0.5 - number) for number in range(8)]))
    with pytest.raises(ValueError, match=r"power of two.*got 12"):
        slopes(12)


def test_the_bias_tells_distance_and_hides_what_follows():
    bias = causal_alibi(8, 4, torch.float32)
    assert bias[0].tolist() == [
        [0, -math.inf, -math.inf, -math.inf],
        [-0.5, 0, -math.inf, -math.inf],
        [-1, -0.5, 0, -math.inf],
        [-1.5, -1, -0.5, 0],
    ]
    assert torch.equal(bias[3], bias[0] / 8)


def test_no_token_sees_what_follows():
    torch.manual_seed(0)
    model, tokens = BTLM(TINY), torch.randint(0, 50, (1, 8))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 50
    first, second = model(tokens), model(other)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_a_small_one_learns_a_text_by_heart():
    torch.manual_seed(0)
    model, tokens = BTLM(TINY), torch.randint(0, 50, (2, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] / 10
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_scales_follow_the_width():
    """Of the maximal update parametrisation: logits by base width over width, scores by the head's width."""
    torch.manual_seed(0)
    model, tokens = BTLM(TINY), torch.randint(0, 50, (1, 3))
    hidden = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    logits = model(tokens)
    assert torch.allclose(logits, hidden[0] @ model.embed.weight.T * (2.22 * 256 / 32), atol=1e-5)
