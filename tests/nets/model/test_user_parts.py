"""Blueprints of users' own: named by the setting, run as what they say, refused in words."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from parts_of_users import Grouped, perceptron
from torch import Tensor, nn

from esper_soa.config import registry
from esper_soa.config.nets import SEQUENCES, VECTORS, TaskConfig, sort_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.outcome import compute_cost
from esper_soa.nets.model.blueprints import (
    Architecture,
    initial_seeds,
    names_by_code,
    parameter_counts,
    seed_forward,
    seed_table,
)
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.model.user_module import UserModule
from esper_soa.nets.model.user_parts import (
    blueprint_findings,
    task_blueprints,
    task_shape,
    tensor_findings,
)
from esper_soa.nets.precision import autocast
from esper_soa.state import Slots, initial
from esper_soa.system import streams
from esper_soa.system.errors import SettingError
from esper_soa.vocabulary import BLUEPRINT_NAMES, Stage
from tests.builders.tiny_world import CPU, assert_alone, rules_from, tiny_settings

HERE = "parts_of_users"
GROUPED = Architecture(13, "grouped", (UserModule(Grouped),), residual=False)
PERCEPTRON = Architecture(13, "perceptron", (UserModule(perceptron),), residual=False)
NETS = 3
BATCH = 4
CHANNELS = 8
SIDE = 6


def own(*names: str) -> list[str]:
    """The setting with conv_light and these blueprints of parts_of_users."""
    return ["conv_light", *(f"{HERE}:{name}" for name in names)]


def settings(*names: str, envs: int = 3, steps: int = 9, **changed: object) -> TrainConfig:
    """Tiny hosts with two slots, in which these blueprints grow."""
    cfg = tiny_settings(envs, 2, steps)
    return replace(cfg, task=replace(cfg.task, blueprints=own(*names)), **changed)  # type: ignore[arg-type]


# --- what a module is


def rows_and_features(
    blueprint: Architecture, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Fresh rows [n, parameters] and features [B, n*C, H, W] as the engine has them."""
    keys = streams.stream_keys(5, streams.SEED_INIT, (0,), torch.arange(NETS))
    rows = initial_seeds(blueprint, CHANNELS, keys, torch.tensor([False, True, False]), dtype)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(BATCH, NETS * CHANNELS, SIDE, SIDE, generator=g, dtype=dtype)
    return rows, x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(("blueprint", "make"), [(GROUPED, Grouped), (PERCEPTRON, perceptron)])
def test_a_module_is_run_for_each_network_with_its_own_parameters_and_gradient(
    blueprint: Architecture, make: registry.Part, needs_gradient: bool
) -> None:
    """Whether or not the host wants a gradient."""
    rows, x = rows_and_features(blueprint, torch.float32)
    before = x.clone()
    rows.requires_grad_()
    x.requires_grad_(needs_gradient)
    out = seed_forward(blueprint, seed_table(blueprint, CHANNELS).unpack(rows), x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, before), "the module has written to the host's features"
    (gradient,) = torch.autograd.grad(out.square().sum(), [rows])
    for env, features in enumerate(before.unflatten(1, (NETS, -1)).unbind(1)):
        module = make(CHANNELS)
        assert isinstance(module, nn.Module)
        nn.utils.vector_to_parameters(rows[env].detach(), module.parameters())
        alone = module(features.clone(memory_format=torch.contiguous_format))
        torch.testing.assert_close(out.unflatten(1, (NETS, -1))[:, env], alone)
        wanted = torch.autograd.grad(alone.square().sum(), [*module.parameters()])
        wanted = torch.cat([one.reshape(-1) for one in wanted])
        torch.testing.assert_close(gradient[env], wanted, rtol=1e-4, atol=1e-4)
        assert wanted.abs().sum() > 0


def test_a_module_begins_as_it_would_by_itself_and_by_the_stream_of_its_env_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    rows, _ = rows_and_features(GROUPED, torch.float32)
    assert torch.equal(torch.get_rng_state(), before), "the generator of the process was moved"
    keys = streams.stream_keys(5, streams.SEED_INIT, (0,), torch.arange(NETS))
    for env in range(NETS):
        torch.manual_seed(int(keys[env]))
        alone = torch.cat([one.detach().reshape(-1) for one in Grouped(CHANNELS).parameters()])
        assert torch.equal(rows[env], alone)
    assert not torch.equal(rows[0], rows[1])


def test_parameters_and_flop_of_a_module_are_counted() -> None:
    task = TaskConfig(base_channels=CHANNELS, num_blocks=2, num_pools=2)
    slots = sort_slots(task, ["r1c0"])  # 8 channels of 16x16 pixels
    shape = host_shape(task, slots, task_blueprints(own("grouped", "perceptron"), slots))
    counts = parameter_counts(shape.blueprints, shape.slots[0])[13:]
    assert counts == [9 * 64 + 8 + 16, 2 * 128 + 16 + 8]
    flop = training_flop(shape, CPU).seed[0, 13:].tolist()
    assert flop == [3 * 2 * 256 * 9 * 64, 3 * 2 * 2 * 128]


# --- names and codes


def test_own_blueprints_take_the_codes_behind_the_packages_in_the_order_of_the_setting() -> None:
    offered = [f"{HERE}:grouped", "norm", f"{HERE}:twice", f"{HERE}:instead"]
    task = replace(settings().task, blueprints=offered)
    rules = rules_from(replace(settings(), task=task), CPU)
    shape = rules.setup.shape
    assert names_by_code(shape.blueprints) == (*BLUEPRINT_NAMES, "grouped", "twice", "instead")
    assert [shape.blueprint(code).name for code in (13, 14, 15)] == ["grouped", "twice", "instead"]
    assert rules.blueprints.nonzero().flatten().tolist() == [3, 13, 14, 15]
    assert (shape.blueprint(14).residual, shape.blueprint(15).residual) == (True, False)


# --- whole episodes


@pytest.mark.parametrize(
    "names", [("perceptron", "twice"), pytest.param(("grouped",), marks=pytest.mark.slow)]
)
def test_an_env_of_many_plays_as_it_does_alone(names: tuple[str, ...]) -> None:
    """One network per forward pass, so that sums have one order: seeds of modules to the bit."""
    compute = ComputeConfig(workers=2, env_chunk=1, engine="torch")
    assert_alone(settings(*names, envs=3, compute=compute))


# --- engines


@pytest.mark.usefixtures("native")
def test_parts_and_modules_go_to_the_kernels_in_c_or_it_is_said_why_not() -> None:
    assert rules_from(settings("twice", "instead", "grouped"), CPU).engine.chosen.native
    chosen = rules_from(settings("twice", "perceptron"), CPU).engine.chosen
    assert (chosen.native, chosen.fallback) == (False, True)
    why = r"there is none for add_ in forward, users/parts_of_users.py:\d+ \(blueprint perceptron\)"
    assert re.search(f"{why}$", chosen.reason)
    told = f"compute.engine=native: .*{why}"
    with pytest.raises(SettingError, match=told):
        rules_from(settings("twice", "perceptron", compute=ComputeConfig(engine="native")), CPU)


# --- faults, told while building


FITS = r"can stand in the slots\. (blueprint \w+: |with 2 channels of 32x32 pixels )?"
BEFORE = f"(module:name of a module that can be |a blueprint that ({FITS})?)?"
FAULTS = {
    "nowhere:twice": (
        r"imported \(No module named 'nowhere'\). PYTHONPATH=<folder> says where it lies"
    ),
    "parts_of_users.deeper:twice": (
        r"imported \(No module named 'parts_of_users.deeper'; 'parts_of_users' is not a "
        r"package\)\. PYTHONPATH=<folder> says where it lies"
    ),
    "parts_of_users.py:twice": r"imported \(.*\)\. A module is named without \.py",
    "thrice": (
        r"parts_of_users registers \(bare, .*, word\). @esper_soa.blueprint\(\"thrice\"\) above "
        r"a function or class there registers it"
    ),
    "unmarked": (
        r"a blueprint that parts_of_users registers \(bare, .*, word\)\. "
        r"@esper_soa\.blueprint\(\"unmarked\"\) above a function or class there registers it"
    ),
    "same": (
        "registered once in parts_of_users. 2 of its functions and classes are the blueprint same"
    ),
    "norm": ".*name.*",
    "narrower": ".*narrower: .* 1 .* 8.*",
    "word": (
        r"it gives conv_light, no tuple of parts \(Conv, Depthwise, SoftNorm, Excite, Dense, "
        r"CausalAttention, SoftLayerNorm\) and no Architecture"
    ),
    "bare": "blueprint bare: it gives a module, so it must be called with the channels of a slot",
    "greedy": "it is called with the channels of a slot or with nothing, and wants more",
    "counting": (
        "it keeps buffers .running_mean, running_var, num_batches_tracked., which all networks "
        "would share"
    ),
    "empty": "with 2 channels of 32x32 pixels it has no parameters",
    "flat": "it takes vectors, which no slot has",
    "frozen": ".*weight.*",
    "shrinking": r"its output is of shape \[2, 2, 30, 30\], not \[2, 2, 32, 32\]",
    "half": "its output is of torch.bfloat16, not torch.float32",
    "failing": "it raises ValueError: in_channels must be divisible by groups",
    "dropping": "it draws random numbers.*",
    "hoarding": ".*scale.*",
    "no such word": "one of conv_light, .*, or module:name of your own blueprint",
    "a.b:": "one of conv_light, .*, or module:name of your own blueprint",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_blueprint_that_cannot_grow_is_refused_while_building(name: str) -> None:
    reference = f"{HERE}:{name}" if name.isidentifier() else name
    told = rf"^task.blueprints={reference}: must be {BEFORE}{FAULTS[name]}\.$"
    with pytest.raises(SettingError, match=told):
        task_shape(TaskConfig(blueprints=["norm", reference], base_channels=2), ["r0c0"])


def test_a_mark_takes_a_name() -> None:
    with pytest.raises(TypeError, match=r'takes a name, as in @esper_soa\.reward\("mine"\)$'):
        registry.reward(len)  # type: ignore[arg-type]


class Muddle(nn.Module):
    """All faults at once that do not keep it from a first pass."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1).double()
        self.conv.more = nn.Identity()  # type: ignore[assignment]
        self.conv.more.share, self.conv.more.scale = self.conv.weight, torch.ones(1)  # type: ignore[assignment]
        self.conv.more.shift = torch.zeros(1)  # type: ignore[assignment]
        self.conv.whole = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
        self.conv.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.double() + torch.rand(1))[..., 1:].requires_grad_()


def test_all_faults_of_a_module_are_told_at_once() -> None:
    def findings(make: Callable[[int], object], topology: str, *shape: int) -> list[str]:
        part = UserModule(make, topology)  # type: ignore[arg-type]
        return blueprint_findings(Architecture(13, "own", (part,), residual=False), shape)

    before = torch.get_rng_state()
    found = findings(Muddle, SEQUENCES, 2, 5)
    values = (
        *("conv.weight, conv.whole, conv.more.share", "conv.whole", "parameters", "(scale, shift)"),
        *("random", "[2, 2, 4], not [2, 2, 5]", "torch.float64, not torch.float32", "gradient"),
    )
    assert len(found) == len(values)
    for fault, value in zip(found, values, strict=True):
        assert fault.startswith("with 2 channels of 5 positions ")
        assert value in fault
    assert torch.equal(torch.get_rng_state(), before)
    assert findings(lambda channels: 3, VECTORS, 2) == [
        "with 2 channels it gives a int, not an nn.Module"
    ]
    whole = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    assert list(tensor_findings("it", whole, [1, 2], None, CPU)) == [
        "it is of shape [2, 1], not [1, 2]",
        "it is of torch.int64, not of floating-point numbers",
        "it is on meta, not on cpu",
    ]
    assert list(tensor_findings("it", 3, [], None, CPU)) == ["it is a int, not a tensor"]


def test_what_is_marked_is_what_it_was_and_what_derives_from_it_is_not_marked() -> None:
    class Derived(Grouped):
        pass

    assert isinstance(Grouped(2), Grouped)
    assert registry.marked_name(registry.BLUEPRINT, Grouped) == "grouped"
    assert registry.marked_name(registry.BLUEPRINT, Derived) is None
    assert registry.marked_name(registry.REWARD, Grouped) is None
    told = "<built-in function len> is not marked by @esper_soa.layer, so no file can name it"
    with pytest.raises(ValueError, match=f"^{told}$"):
        registry.reference_to(registry.LAYER, len)
    assert registry.num_required(lambda one, /, other=1, *, third: one) == 2


# --- what reports and policies make of them


def fossils(codes: list[list[int]]) -> Slots:
    slots = initial(Slots, (1, len(codes[0])), CPU)
    stage = torch.full_like(slots.stage, Stage.FOSSILIZED)
    return slots.replace(stage=stage, blueprint=torch.tensor(codes))


def test_the_forward_pass_of_an_own_fossil_costs_its_multiplications() -> None:
    rules = rules_from(settings("twice", slots=["r0c0", "r1c0"]), CPU)
    shape = rules.setup.shape
    costs = training_flop(rules.setup.shape, CPU)
    # two layers of 2 to 2 channels, pointwise; the slots r0c0 and r1c0 have 32x32 and 16x16 pixels
    first, second = (2 * pixels * 2 * 2 / shape.products for pixels in (1024, 256))
    for codes, cost in (([[13, 13]], 1 + first + second), ([[1, 13]], 1.15 + second)):
        assert compute_cost(fossils(codes), costs).item() == pytest.approx(cost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_takes_features_of_16_bits_and_gives_such(dtype: torch.dtype) -> None:
    """As blocks give them on a GPU; weights are float32."""
    part = UserModule(lambda channels: nn.Conv2d(channels, channels, 1))
    blueprint = Architecture(13, "pointwise", (part,), residual=False)
    rows, x = rows_and_features(blueprint, torch.float32)
    parameters = seed_table(blueprint, CHANNELS).unpack(rows)
    wanted = seed_forward(blueprint, parameters, x)
    with autocast(dtype, CPU):
        out = seed_forward(blueprint, parameters, x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.05)
