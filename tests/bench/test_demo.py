import torch
from torch import nn

from bench.demo import Run, differences
from bench.models.char_gpt import VOCABULARY, CharGPT, Shape, batches, next_character_loss, standard_library

TINY = Shape(blocks=2, width=16, heads=2, length=8)


def trained(seed: int = 0, steps: int = 2) -> Run:
    torch.manual_seed(seed)
    model = CharGPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = next_character_loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = Run("test", model, optimizer, torch.get_rng_state(), step)
    for batch in batches(torch.arange(100) % VOCABULARY, steps, 2, TINY.length, seed=0):
        run.train(batch)
    return run


def test_the_same_training_twice_has_no_differences():
    assert differences(trained(), trained()) == []


def test_another_seed_is_another_training():
    assert {"loss 0", "random numbers", "head.weight", "head.weight.exp_avg"} <= set(differences(trained(), trained(seed=1)))


def test_one_bit_is_a_difference():
    one, two = trained(), trained()
    with torch.no_grad():
        two.model.get_parameter("norm.bias")[3] = -0.0
        one.model.get_parameter("norm.bias")[3] = 0.0
    assert differences(one, two) == ["norm.bias"]


def test_a_state_that_only_one_has_is_a_difference():
    one, two = trained(), trained()
    two.optimizer.state[two.model.get_parameter("norm.bias")]["extra"] = 1
    assert differences(one, two) == ["norm.bias.extra"]


def test_runs_draw_from_generators_of_their_own():
    before = torch.get_rng_state()
    run = trained(steps=0)
    torch.set_rng_state(before)
    run.train(batches(torch.arange(100), 1, 2, TINY.length, seed=0)[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(run.randomness, before)


def test_a_prediction_sees_nothing_of_what_follows():
    model = CharGPT(TINY).eval()
    text = torch.arange(8)[None]
    changed = torch.where(torch.arange(8) == 5, 99, text)
    differ = (model(text) != model(changed)).any(-1)[0]
    assert differ.tolist() == [False] * 5 + [True] * 3


def test_batches_pair_each_character_with_the_next():
    text = standard_library()
    assert len(text) > 1_000_000
    assert int(text.min()) >= 0
    assert int(text.max()) < VOCABULARY
    characters, following = batches(text, 1, 3, 16, seed=0)[0]
    assert characters.shape == following.shape == (3, 16)
    assert torch.equal(characters[:, 1:], following[:, :-1])


def test_the_loss_starts_at_that_of_a_guess():
    torch.manual_seed(0)
    model = CharGPT(TINY)
    assert isinstance(model.head, nn.Linear)
    loss = next_character_loss(model, *batches(standard_library(), 1, 4, TINY.length, seed=0)[0])
    assert abs(loss.item() - torch.tensor(VOCABULARY).log().item()) < 0.2
