"""Settings of which each env has its own: an env is a run of one env with them, to the bit."""

import math
from dataclasses import replace
from itertools import product
from operator import attrgetter

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import PolicyConfig
from esper_soa.config.arguments import expand_slots
from esper_soa.config.compose import compose_settings
from esper_soa.config.env import ENV_SETTINGS, REWARD_MODE, RewardConfig
from esper_soa.config.nets import DATA_NAME, DataConfig, TaskConfig, TransformerConfig
from esper_soa.config.ranges import EnvDraw
from esper_soa.config.settings import TrainConfig
from esper_soa.env.ahead import KERNELS, example_inputs, leaves
from esper_soa.env.env import Env
from esper_soa.env.env_settings import config_of_envs
from esper_soa.env.observation import feature_names
from esper_soa.env.reward import final_rents
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.state import same_bits
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.metrics import RoundResult
from esper_soa.vocabulary import Blend, Blueprint
from tests.builders.tiny_world import CPU, SingleEnv, quiet_progress, tiny_settings

ENVS = 3
ROUND = 2
LISTS = {
    "task.host_lr": "[0.3,0.1]",
    "task.seed_lr": "[0.3,0.1]",
    "task.momentum": "[0.5,0.9]",
    "task.weight_decay": "[0.1,0.0]",
    "task.max_grad_norm": "[0.05,0]",
    "reward.rent_weight": "[0.5,3]",
    "reward.max_rent": "[0.01,0.02,0.03]",
    "reward.flop_weight": "[0.5,3]",
    "reward.seed_occupancy_cost": "[0.5,0.1]",
    "reward.fossilized_maintenance_cost": "[0.5,0.1]",
    "reward.terminal_accuracy_weight": "[0.05,1]",
    "reward.param_penalty_weight": "[500,2]",
    "reward.loss.compute_rent_weight": "[0.5,3]",
    "data.share": "[1,0.2]",
    "data.label_noise": "[0,0.5]",
    "early_stop.length": "[0,4,5]",
    "gates.min_blending_steps": "[1,3]",
    "lifecycle.embargo_steps": "[1,4]",
    "lifecycle.min_prune_age": "[1,4]",
}
RANGES = dict.fromkeys(LISTS, "uniform(0.01,0.9)") | {
    "task.host_lr": "log_uniform(0.005, 0.5)",
    "reward.rent_weight": "log_uniform(0.1,10)",
    "early_stop.length": "uniform(3,7)",
    "gates.min_blending_steps": "uniform(1,3)",
    "lifecycle.embargo_steps": "log_uniform(1,4)",
    "lifecycle.min_prune_age": "uniform(0,4)",
}
SETS = {DATA_NAME: "[synthetic,fashion32]"}
WORDS = SETS | {REWARD_MODE: "[net,shaped,loss]"}
PACE = {name: LISTS[name] for name in LISTS if name.startswith(("gates.", "lifecycle."))}
TEXT_LACKS = ("data.label_noise", DATA_NAME)
MODES = {
    "reward.param_penalty_weight": "basic",
    "reward.loss.compute_rent_weight": "loss",
    "reward.flop_weight": "net",
}


def changed(cfg: TrainConfig, values: dict[str, object]) -> TrainConfig:
    """The settings with others under dotted names."""
    groups: dict[str, dict] = {}
    for name, value in values.items():
        *_, group, last = name.split(".")
        if not (cfg.data.is_text and name in TEXT_LACKS):
            groups.setdefault(group, {})[last] = value
    loss = replace(cfg.reward.loss, **groups.pop("loss", {}))
    cfg = replace(cfg, reward=replace(cfg.reward, loss=loss))
    return replace(cfg, **{name: replace(vars(cfg)[name], **own) for name, own in groups.items()})


def images(mode: str) -> TrainConfig:
    tiny = tiny_settings(ENVS, 3, 6, RewardConfig(mode=mode))
    return replace(tiny, val_samples=16, data=DataConfig("synthetic", synthetic_train=32))


def growth(mode: str) -> TrainConfig:
    """Time to prune, and to grow again."""
    return replace(images(mode), steps=24)


def text(mode: str) -> TrainConfig:
    sizes = TransformerConfig(width=8, layers=2, heads=2, context=8, segments=2)
    task = TaskConfig(
        host="transformer", num_classes=256, blueprints=["norm", "lora"], transformer=sizes
    )
    tiny = images(mode)
    return replace(tiny, task=task, slots=["r0c0", "r0c1"], data=DataConfig("text", context=8))


def played(cfg: TrainConfig, plain: bool = False, env: int | None = None) -> tuple:
    """The world after an episode of random play, and its result; env: the only one there is."""
    world = build_world(cfg if env is None else replace(cfg, envs=1), CPU)
    engine = TorchEngine() if plain else world.rules.engine
    setup = world.setup._replace(env_chunk=1)
    rules = world.rules._replace(engine=engine, setup=setup)
    reduction = world.reduction if env is None else SingleEnv(env, ENVS)
    world = World(rules, world.data, cfg.seed, reduction=reduction)
    # a fossil in the first slot, and random play in the others
    code = Blueprint.LORA if cfg.task.host == "transformer" else Blueprint.CONV_LIGHT
    blueprint = torch.full((ENVS, len(cfg.slots)), Blueprint.NONE)
    blueprint[:, 0] = code
    alpha = torch.zeros(blueprint.shape, dtype=torch.float64)
    alpha[:, 0] = 1
    topology = Topology(blueprint, torch.full_like(blueprint, Blend.ADD), alpha)
    request = Round(ROUND, quiet_progress(), topology=topology)
    return world, play_round(world, Player(RandomPolicy(), None), request)[0]


def facts(world: World, result: RoundResult, env: int) -> list[object]:
    """Everything that an env ends with."""
    rows = world.weights.select("host", "seeds").flatten_keys(".").items()
    weights = [row for _, one in rows for row in one[env].flatten().tolist()]
    return [result.accuracies[env], result.parameters[env], result.rewards[env], *weights]


def test_every_setting_that_can_differ_is_looked_at_here() -> None:
    assert {*LISTS, *WORDS} == {*ENV_SETTINGS}


GIVEN = LISTS | SETS, RANGES | SETS
CASES = [*product((images, text), ("shaped", "basic", "loss", "net"), (False, True), GIVEN)]
FEW = [(images, "shaped", False, GIVEN[0]), (images, "basic", True, GIVEN[1])]
FEW += [(text, "shaped", False, GIVEN[1]), (text, "loss", True, GIVEN[0])]
FEW += [(growth, "shaped", False, PACE), (images, "shaped", False, LISTS | WORDS)]


@pytest.mark.parametrize(
    ("domain", "mode", "plain", "given"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in FEW)],
)
def test_an_env_is_a_run_of_one_env_with_its_settings(domain, mode, plain, given) -> None:
    """plain: in torch, else in C."""
    world, every = played(changed(domain(mode), given), plain)
    assert set(every.settings) == {*given}.difference(TEXT_LACKS if domain is text else ())
    for env in range(ENVS):
        own = {name: values[env] for name, values in every.settings.items()}
        single = played(changed(domain(mode), own), plain, env)
        assert facts(world, every, env) == facts(*single, 0)
        assert every.episodes[env]["settings"] == own


@pytest.mark.parametrize(("name", "values"), (LISTS | WORDS).items())
def test_a_setting_of_one_env_touches_that_env_alone(name: str, values: str) -> None:
    cfg = (growth if name in PACE else images)(MODES.get(name, "shaped"))
    first = values.strip("[]").split(",")[0]
    alike = played(changed(cfg, {name: first if name in WORDS else float(first)}))
    world, result = played(changed(cfg, {name: values}))
    assert [facts(world, result, env) == facts(*alike, env) for env in (0, 1)] == [True, False]


@pytest.mark.parametrize("mode", ["shaped", *MODES.values()])
def test_a_list_of_one_value_is_that_value(mode: str) -> None:
    cfg = (growth if mode == "shaped" else images)(mode)
    values = {name: text.strip("[]").split(",")[0] for name, text in (LISTS | SETS).items()}
    alone = {name: one if name in SETS else float(one) for name, one in values.items()}
    lists = {name: f"[{one},{one}]" for name, one in (values | {REWARD_MODE: mode}).items()}
    found, wanted = (played(changed(cfg, given)) for given in (lists, alone))
    assert facts(*found, 1) == facts(*wanted, 1)


def test_a_draw_is_of_seed_round_env_and_name() -> None:
    ranges = {name: own for name, own in RANGES.items() if not ENV_SETTINGS[name].whole}
    cfg = changed(images("net"), ranges)
    world = build_world(cfg, CPU)
    first = world.settings
    assert all(0.01 <= one <= 0.9 for one in first["task.seed_lr"])
    drawn = [one for values in first.values() for one in values]
    assert len(set(drawn)) == len(drawn)
    world.start_round(1)
    assert set(drawn).isdisjoint(one for values in world.settings.values() for one in values)
    world.start_round(0)
    assert world.settings == first
    many = build_world(replace(cfg, envs=5), CPU).settings
    assert all(many[name][:ENVS] == first[name] for name in first)
    other = build_world(cfg, CPU, seed=cfg.seed + 1).settings
    assert set(drawn).isdisjoint(one for values in other.values() for one in values)


def test_a_rank_takes_the_values_of_its_own_envs() -> None:
    cfg = changed(images("net"), LISTS | WORDS)
    built = build_world(cfg, CPU)
    rules = built.rules._replace(setup=built.setup._replace(num_envs=1))
    world = World(rules, built.data, cfg.seed, reduction=SingleEnv(1, ENVS))
    assert world.settings["task.host_lr"] == [0.3, 0.1, 0.3]
    assert world.settings[DATA_NAME] == ["synthetic", "fashion32", "synthetic"]
    assert world.settings[REWARD_MODE] == ["net", "shaped", "loss"]
    assert world.values[REWARD_MODE].tolist() == [1.0]
    assert world.values["task.host_lr"].tolist() == [0.1]
    assert world.work(0).rules.host.lr.tolist() == [[0.1]]


def test_prices_hold_where_envs_are_paid_by_several_modes() -> None:
    cfg = images("shaped")
    cfg = replace(cfg, reward=RewardConfig(mode="[shaped,basic]", max_rent=100))
    own, low, high = (
        played(changed(cfg, {"reward.rent_weight": price}))[1].rewards
        for price in ("[0.001,1,10]", 0.001, 10)
    )
    assert [own[0], own[2]] == [low[0], high[2]]
    assert low[2] != high[2]


def test_a_range_of_logarithms_has_as_many_below_its_geometric_mean() -> None:
    cfg = replace(images("net"), envs=400)
    values = build_world(changed(cfg, {"task.host_lr": "log_uniform(0.01,1)"}), CPU).settings
    assert 160 < sum(one < 0.1 for one in values["task.host_lr"]) < 240


@pytest.mark.parametrize("drawn", ["uniform(1,3)", "log_uniform(1, 3)"])
def test_counts_are_drawn_whole_and_from_both_ends(drawn: str) -> None:
    cfg = changed(replace(images("net"), envs=60), {"gates.min_blending_steps": drawn})
    assert {*build_world(cfg, CPU).settings["gates.min_blending_steps"]} == {1, 2, 3}


def test_a_share_of_a_range_is_a_number_of_it() -> None:
    counts = EnvDraw(1, 3, log=False, whole=True)  # a third of the way each
    assert [counts.at(share) for share in (0.0, 0.33, 0.34, 0.66, 0.67, 0.99)] == [1, 1, 2, 2, 3, 3]
    counts = counts._replace(log=True)  # 4 to the power of the share
    assert [counts.at(share) for share in (0.0, 0.49, 0.5, 0.79, 0.8, 0.99)] == [1, 1, 2, 2, 3, 3]
    assert EnvDraw(1.0, 3.0, log=False).at(0.25) == 1.5
    assert EnvDraw(0.01, 1.0, log=True).at(0.25) == pytest.approx(10**-1.5)


@pytest.mark.parametrize("name", ["rent_weight", "loss.compute_rent_weight"])
def test_the_settings_of_a_run_stay_as_they_are_where_kernels_read_those_of_envs(name: str) -> None:
    reward = RewardConfig(mode="loss")
    prices = torch.tensor([1.0, 2.0])
    own = config_of_envs(reward, {f"reward.{name}": prices})
    assert attrgetter(name)(own) is prices
    assert reward == RewardConfig(mode="loss")


def test_every_env_pays_the_rent_of_its_own_price() -> None:
    reward = RewardConfig(rent_weight="[0.5,1]")
    found = final_rents([200.0, 200.0], 100, reward, {"reward.rent_weight": [0.5, 1.0]})
    assert found[1] == 2 * found[0] > 0


def test_net_takes_at_the_end_what_final_tables_call_rent() -> None:
    """Parameters and training FLOP at the prices of the env, over an episode of its own length."""
    free = {"reward.rent_weight": 0, "reward.max_rent": 100, "early_stop.length": "[0,4,5]"}
    prices = {"reward.rent_weight": "[1,3]", "reward.flop_weight": "[0.5,2,5]"}
    unpaid = played(changed(images("net"), free))[1]
    world, paid = played(changed(images("net"), free | prices))
    taken = [one - other for one, other in zip(unpaid.rewards, paid.rewards, strict=True)]
    rents = world.final_rents(paid.parameters, paid.train_flop, paid.settings)
    assert taken == pytest.approx(rents)
    steps = [6, 4, 5]
    spent = [world.flop.host * world.setup.train_samples * count for count in steps]
    assert all(one > host for one, host in zip(paid.train_flop, spent, strict=True))
    without = world.final_rents(paid.parameters, spent, paid.settings)
    dear = [rent - other for rent, other in zip(rents, without, strict=True)]
    growth = [math.log(one / host) for one, host in zip(paid.train_flop, spent, strict=True)]
    assert dear == pytest.approx([w * one for w, one in zip((0.5, 2, 5), growth, strict=True)])


def test_final_tables_price_the_training_of_episodes_as_long_as_all_envs_have_them() -> None:
    prices = {"reward.rent_weight": 0, "reward.flop_weight": 1, "early_stop.length": 4}
    world = build_world(changed(images("net"), prices), CPU)
    host = world.flop.host * world.setup.train_samples
    hosts = [float(world.rules.reward.counts.host)] * 2
    assert world.final_rents(hosts, [4 * host, 8 * host], {}) == pytest.approx([0, math.log(2)])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("task.host_lr=[0.01, 0.02]", "[0.01, 0.02]"),
        ("task.host_lr='[0.01,0.02]'", "[0.01,0.02]"),
        ("++task.host_lr=log_uniform(0.005, 0.05)", "log_uniform(0.005, 0.05)"),
        ("task.host_lr=1", 1.0),
        ("gates.min_blending_steps=3.0", 3),
        ("gates.min_blending_steps=[1, 3]", "[1, 3]"),
        ("data.name=[cifar10, fashion32]", "[cifar10, fashion32]"),
        ("reward.mode=[net, my.rewards:mine]", "[net, my.rewards:mine]"),
    ],
)
def test_the_command_line_takes_lists_ranges_and_numbers(given: str, found: object) -> None:
    name = given.lstrip("+").split("=")[0]
    value = attrgetter(name)(compose_settings("", [given]))
    assert value == found
    assert type(value) is type(found)


def test_a_sweep_takes_several_lists() -> None:
    given = "task.host_lr=[0.01,0.02],0.03,log_uniform(0.1, 1)"
    (found,) = OverridesParser.create().parse_overrides(expand_slots([given]))
    texts = ["'[0.01,0.02]'", "0.03", "'log_uniform(0.1, 1)'"]
    assert list(found.sweep_string_iterator()) == texts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task.host_lr=[0.1,-1]", r"task.host_lr=-1.0: must be in \(0, 1000\], or a list"),
        ("task.momentum=[0.1,1]", r"task.momentum=1.0: must be in \[0, 1\)"),
        ("task.host_lr=[]", r"task.host_lr=\[\]: must be"),
        ("task.host_lr=fast", r"task.host_lr=fast: must be"),
        ("task.host_lr=[0.1,nan]", r"task.host_lr=nan: must be"),
        ("task.host_lr=uniform(0.2,0.1)", r"task.host_lr=uniform\(0.2,0.1\): must be"),
        ("task.weight_decay=log_uniform(0,0.1)", "task.weight_decay=log_uniform.*: must be"),
        ("task.host_lr=uniform(-1,1)", r"task.host_lr=-1.0: must be in \(0, 1000\]"),
        ("reward.rent_weight=uniform(1)", r"reward.rent_weight=uniform\(1\): must be"),
        ("gates.min_blending_steps=2.5", r"steps=2.5: must be a whole number in \[0, "),
        ("lifecycle.embargo_steps=[3,0]", r"embargo_steps=0.0: must be a whole number in \[1, "),
        ("early_stop.length=uniform(2.5,4)", "early_stop.length=2.5: must be a whole number"),
        ("data.name=uniform(1,2)", r"data.name=uniform\(1,2\): must be"),
        ("data.name=[fashion32,text]", r"data.name=\[fashion32,text\]: must be"),
        ("data.name=[fashion32,my.sets:mine]", "of which envs take one in turn"),
        ("data.name=[]", "of which envs take one in turn"),
    ],
)
def test_a_value_out_of_range_is_named(text: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        compose_settings("", [text])


def test_adamw_has_one_momentum() -> None:
    with pytest.raises(SettingError, match=r"task.momentum=\[0.1, 0.2\]: must be one number"):
        TaskConfig(optimizer="adamw", momentum="[0.1, 0.2]")


def test_a_policy_sees_the_settings_of_its_env_that_it_asks_for() -> None:
    cfg = changed(images("net"), {"reward.rent_weight": "[0.001,10]"})
    asked = ["reward.rent_weight", "task.host_lr"]
    told = replace(cfg, policy=PolicyConfig(observe=asked))
    plain, full = (Env(build_world(one, CPU)) for one in (cfg, told))
    before, found = (env.reset(ROUND).view.observation.features for env in (plain, full))
    names = feature_names(tuple(cfg.slots), asked)
    places = [names.index(name) for name in asked]
    # 1 + log10(value) / 6, of 0.001, 10 and the default rate of 0.01
    price, rate = found[:, places].T
    assert price.tolist() == pytest.approx([1 / 2, 7 / 6, 1 / 2])
    assert rate.tolist() == pytest.approx([2 / 3] * ENVS)
    others = [place for place in range(len(names)) if place not in places]
    assert torch.equal(found[:, others], before)
    assert torch.equal(full.current_view().observation.features[:, places], found[:, places])


@pytest.mark.slow
def test_compiled_kernels_read_prices_and_what_is_seen() -> None:
    given = {"reward.rent_weight": "[0.001,10]", "reward.loss.compute_rent_weight": "[1,2]"}
    policy = PolicyConfig(observe=["reward.rent_weight"])
    rules = build_world(replace(changed(images("net"), given), policy=policy), CPU).rules
    inputs = example_inputs(rules, ENVS)
    for (name, kernel), arguments in zip(KERNELS.items(), inputs, strict=True):
        torch.compiler.reset()
        compiled = torch.compile(kernel, fullgraph=True, dynamic=False, backend="eager")
        assert same_bits(leaves(compiled(rules, *arguments)), leaves(kernel(rules, *arguments))), (
            name
        )
        assert len(arguments[-1]) == 2


def test_a_share_of_the_samples_is_drawn_and_lies_in_a_larger_one() -> None:
    cfg = changed(replace(images("net"), envs=2), {"data.share": "[0.5,0.25]"})
    world = build_world(cfg, CPU)
    drawn = [set[int](), set[int]()]
    for number in range(8):
        world.start_round(number)
        for step in range(cfg.steps):
            for env, row in enumerate(world.work(step).training.draw.order.tolist()):
                drawn[env] |= {*row}
    assert [len(one) for one in drawn] == [16, 8]  # of 32
    assert drawn[1] < drawn[0] != {*range(16)}


def test_noise_gives_a_share_of_the_images_one_random_label_each() -> None:
    cfg = replace(
        changed(images("net"), {"data.label_noise": "[0,0.5,1]"}),
        train_samples=1000,
        data=DataConfig("synthetic", synthetic_train=1000, label_noise="[0,0.5,1]"),
    )
    world = build_world(cfg, CPU)
    wrong = []
    for step in range(2):  # every image once in each
        feed = world.work(step).training
        labels = feed.crops(torch.arange(ENVS), 0, 500).labels
        order = feed.draw.order
        rows = torch.zeros_like(labels).scatter(1, order, (labels - world.data.train_labels[order]))
        wrong.append(rows)
    assert torch.equal(*wrong)
    # of a random label one in ten is the true one
    assert (wrong[0] != 0).double().mean(1).tolist() == pytest.approx([0, 0.45, 0.9], abs=0.05)


def test_an_episode_has_the_length_of_its_env_and_pays_its_end() -> None:
    cfg = changed(images("shaped"), {"early_stop.length": "[0,3,4]"})
    paid, unpaid = (
        played(changed(cfg, {"reward.terminal_accuracy_weight": weight}))[1] for weight in (10, 0)
    )
    assert [one["env_steps"] for one in paid.episodes] == [6, 3, 4]
    assert [one["ended_by"] for one in paid.episodes] == ["limit", "length", "length"]
    gained = [one - other for one, other in zip(paid.rewards, unpaid.rewards, strict=True)]
    assert gained == pytest.approx([10 * accuracy for accuracy in paid.accuracies])
    assert paid.accuracies[1] > 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"split": True, "share": 0.5}, "data.share=0.5: .*data.split=true"),
        ({"name": "text", "label_noise": "[0,1]"}, "data.label_noise=.* data.name=text"),
        ({"name": "[cifar10,npz]", "root": "x"}, "data.name=.*data.root"),
        ({"name": "[npz,fashion32]", "split": True}, "data.name=.*data.split=true"),
        ({"name": "[synthetic,fashion32]", "root": "x"}, r"data.root=x: .*data.name"),
        ({"name": "[npz,fashion32]", "layout": "nchw"}, "data.layout=nchw: .*data.name=fashion32"),
    ],
)
def test_data_that_lack_a_setting_refuse_it(given: dict, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        DataConfig(**given)
