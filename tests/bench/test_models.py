import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bench.models
from bench import torchvision_shim
from bench.models import MODELS, Workload, get
from bench.models.unets import UNet, UNetPlusPlus

# Parameters as published: torchvision's tables, the models' papers or hubs; for the U-Nets, counted by hand below.
PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "mnasnet0_5": 2_218_512,
    "squeezenet1_0": 1_248_424,
    "r3d_18": 33_371_472,
    "vit_b_16": 86_567_656,
    "transformer": 44_140_544,
    "bert-base": 109_483_778,
    "xlm-roberta-base": 278_045_186,
    "gpt2": 124_439_808,
    "gpt-neo-1.3B": 1_315_575_808,
}
SMALL = ("alexnet", "resnet18", "mobilenet_v2", "squeezenet1_0", "transformer")


def loss_of(work: Workload) -> torch.Tensor:
    loss = work.loss(work.model, *work.batch)
    assert loss.shape == ()
    return loss


def tensors_of(work: Workload) -> list[torch.Tensor]:
    return [*work.model.parameters(), *work.model.buffers(), *work.batch]


@pytest.mark.parametrize("name", MODELS)
def test_each_model_builds_without_memory(name: str):
    work = get(name).build(2, "meta")
    assert {tensor.device.type for tensor in tensors_of(work)} == {"meta"}
    assert all(module.training for module in work.model.modules())
    assert name not in PARAMETERS or sum(parameter.numel() for parameter in work.model.parameters()) == PARAMETERS[name]
    batch_dimension = 1 if name == "transformer" else 0
    assert {tensor.shape[batch_dimension] for tensor in work.batch} == {2}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_a_loss_that_every_parameter_serves(name: str):
    work = get(name).build(1, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):  # some ask a tensor's numbers only where it has any
        loss_of(work).backward()
    without = [key for key, parameter in work.model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("name", SMALL)
def test_small_models_run(name: str):
    with torch.no_grad():
        assert torch.isfinite(loss_of(get(name).build(2)))


def test_a_seed_makes_the_same_model_and_batch_and_leaves_the_callers_numbers_alone():
    before = torch.get_rng_state()
    first, again, other = (get("squeezenet1_0").build(1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, two) for one, two in zip(tensors_of(first), tensors_of(again), strict=True))
    assert not torch.equal(first.batch[0], other.batch[0])


def test_the_names_are_listed_when_one_is_wrong():
    with pytest.raises(KeyError, match=r"expected one of alexnet.*got 'alexnett'"):
        get("alexnett")
    with pytest.raises(ValueError, match="at least 1 for alexnet, got 0"):
        get("alexnet").build(0)


def test_big_models_are_what_their_hubs_say():
    neo = get("gpt-neo-1.3B").build(1, "meta").model.config
    assert neo.attention_layers == ["global", "local"] * 12
    assert (neo.hidden_size, neo.num_heads, neo.vocab_size) == (2048, 16, 50_257)
    roberta = get("xlm-roberta-base").build(1, "meta").model.config
    assert (roberta.vocab_size, roberta.num_hidden_layers, roberta._attn_implementation) == (250_002, 12, "sdpa")


@pytest.mark.parametrize(("width", "depth"), [(2, 1), (3, 2), (2, 3)])
def test_a_unet_gives_scores_as_large_as_its_pictures(width: int, depth: int):
    pictures = torch.randn(2, 3, 2**depth * 2, 2**depth * 3)
    expected = (2, 5, *pictures.shape[2:])
    assert UNet(3, 5, width, depth)(pictures).shape == expected
    outputs = UNetPlusPlus(3, 5, width, depth)(pictures)
    assert [output.shape for output in outputs] == [expected] * depth


def double(inputs: int, outputs: int) -> int:
    return 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs


def raised(inputs: int, outputs: int) -> int:
    return 4 * inputs * outputs + outputs


def test_a_unet_has_the_layers_of_figure_1():
    ladder = [64, 128, 256, 512, 1024]
    steps = list(pairwise(ladder))
    expected = double(1, 64) + sum(double(few, many) + raised(many, few) + double(2 * few, few) for few, many in steps) + 2 * 64 + 2
    assert count(get("unet").build(1, "meta").model) == expected


def test_a_unetplusplus_has_the_nodes_of_equation_1():
    ladder = [32, 64, 128, 256, 512]
    expected = double(1, 32) + sum(double(few, many) for few, many in pairwise(ladder)) + 4 * (32 * 2 + 2)
    for i, width in enumerate(ladder):
        expected += sum(raised(ladder[i + 1], width) + double((j + 1) * width, width) for j in range(1, 5 - i))
    assert count(get("unetplusplus").build(1, "meta").model) == expected


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("network", [UNet, UNetPlusPlus])
def test_a_unet_refuses_what_it_cannot_halve(network: type[nn.Module]):
    with pytest.raises(ValueError, match=r"sides that 4 divides .*got 12x10"):
        network(1, 2, 2, 2)(torch.randn(1, 1, 12, 10))
    with pytest.raises(ValueError, match="expected width >= 1 and depth >= 1"):
        network(1, 2, 4, 0)


def test_the_shim_finds_what_torchvision_describes():
    described = '@register_meta("roi_align")\n@torch.library.register_fake("torchvision::nms")\n@torch.library.register_fake("other::x")'
    assert torchvision_shim._DESCRIBED.findall(described) == ["roi_align", "nms"]
    assert torchvision_shim.install() == ()  # once is enough


def test_torchvision_imports_after_the_models_in_a_fresh_process():
    program = "import bench.models, torchvision; print(torchvision.models.resnet18.__name__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "resnet18"), done.stderr


def test_each_model_is_a_function_of_the_module_for_the_command_line():
    model, batch, loss, optimizer = bench.models.bert_base(batch_size=3, device="meta")
    assert batch[0].shape[0] == 3
    assert next(model.parameters()).is_meta
    assert callable(loss)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert bench.models.unet.args == (MODELS["unet"],)
    with pytest.raises(AttributeError, match="no attribute 'no_such_model'"):
        bench.models.no_such_model  # noqa: B018
