"""Would the tests notice? Breaks one line at a time in a copy of the checkout and runs the tests
that guard it.

    python tests/breaks.py [--jobs 2] [--only env] [--write tests/BREAKS.md]

Prints a table: place, change, and the test that went red, or GREEN. A row whose line is no longer
in its file is an
error: the table goes with the code. Ends with status 1 where anything stays green. Takes a quarter
of an hour.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 500  # seconds for the guards of one line
GUARDS = {
    "trainer": (
        "tests/test_build.py tests/test_run_numbers.py tests/test_main_job.py "
        "tests/test_first_pass.py"
    ),
    "resume": "tests/test_resume.py tests/test_run_numbers.py tests/test_damaged_checkpoints.py",
    "evaluation": "tests/test_evaluation_numbers.py tests/test_evaluate.py",
    "agent": "tests/agent tests/test_first_pass.py",
    "world": "tests/env/test_world.py tests/env/test_draws.py tests/nets/test_precision.py",
    "control": (
        "tests/test_controls.py tests/test_topology.py tests/nets/test_flops.py "
        "tests/ops/test_verdict.py"
    ),
    "metrics": "tests/ops/test_metrics.py tests/test_run_numbers.py",
    "nets": "tests/nets/test_initial_weights.py tests/nets/test_seeds_learn.py tests/test_parity.py",  # noqa: E501
    "native": "tests/nets/test_fused.py tests/nets/test_native.py",
    "env": "tests/env tests/test_parity.py",
    "networks": "tests/nets/test_grown.py tests/ops/test_networks.py tests/ops/test_module_files.py",  # noqa: E501
    "library": "tests/test_runs.py tests/test_export.py",
    "own": "tests/nets/test_own_blueprints.py tests/test_own_parts_runs.py "
    "tests/env/test_own_reward.py "
    "tests/agent/test_own_agents.py tests/test_conformance.py",
    "simulator": "tests/test_simulator.py tests/env/test_joint.py tests/test_compose.py "
    "tests/test_own_parts_from_python.py tests/agent/test_own_agents.py "
    "tests/agent/test_controller.py",
    "adapters": "tests/adapters",
    "compare": "tests/ops/test_comparison.py tests/test_compare.py",
    "graphs": "tests/nets/test_graphs.py",
    "replay": "tests/ops/test_replay.py tests/nets/test_graphs.py tests/test_check_device.py",
    "orders": "tests/nets/test_data.py tests/nets/test_permutation.py",
    "arriving": "tests/ops/test_collect.py",
    "gpu": "tests/nets/test_triton_engine.py",
    "command": "tests/test_train_cli.py tests/test_compose.py",
    "plan": "tests/test_plan.py",
    "room": "tests/ops/test_memory.py",
    "split": "tests/env/test_reward_split.py",
    "ranks": "tests/test_ranks.py",
    "early": "tests/env/test_early_stop.py",
    "memory": "tests/agent/test_diagnostics.py",
    "progress": "tests/ops/test_progress.py",
    "ends": "tests/telemetry/test_early_ends.py",
    "stops": "tests/test_early_stop_runs.py",
    "accumulate": "tests/nets/test_accumulate.py",
    "lockstep": "tests/test_lockstep.py tests/test_compare.py",
    "sweeps": "tests/test_multirun.py tests/test_config.py tests/sweep/test_summary.py",
    "launchers": "-m slow tests/sweep/test_launchers.py",
    "reports": "tests/report/test_run_tables.py",
    "telemetry": (
        "tests/telemetry/test_recorder.py tests/telemetry/test_tracking.py "
        "tests/report/test_standings.py"
    ),
}


class Break(NamedTuple):
    """One line, what becomes of it, and the group of tests that guards it."""

    path: str  # below esper_soa/
    before: str
    after: str
    guard: str


BREAKS = (
    Break(
        "nets/grown.py",
        "FELT_STAGES = (Stage.BLENDING, ",
        "FELT_STAGES = (Stage.TRAINING, Stage.BLENDING, ",
        "networks",
    ),
    Break("nets/grown.py", "own[:, row_layout(shape, number).seed :]", "own", "networks"),
    Break(
        "ops/networks.py",
        "_rank(found.spec) > _rank(self.best)",
        "_rank(found.spec) >= _rank(self.best)",
        "networks",
    ),
    Break("ops/networks.py", "if round_of_network(path) > rounds:", "if False:", "networks"),
    Break(
        "env/topology.py", "select(panic, after.slots, before.slots)", "before.slots", "networks"
    ),
    Break("ops/module_files.py", 'if entry["sha256"] != digest(tensors):', "if False:", "networks"),
    Break("runs.py", "torch.set_num_threads(threads)", "pass", "library"),
    Break("compose.py", "instances.update(held)", "pass", "library"),
    Break(
        "running.py",
        "done.rewards = result.rewards\n",
        "done.rewards = result.accuracies\n",
        "trainer",
    ),
    Break(
        "running.py",
        "reward=sum(done.rewards) / len(done.rewards)",
        "reward=sum(done.rewards) / cfg.rounds",
        "trainer",
    ),
    Break(
        "running.py",
        'return cfg.control not in ("none", cfg.policy.name)',
        'return cfg.control != "none"',
        "trainer",
    ),
    Break(
        "running.py",
        '{"round": number + 1, "env": env}',
        '{"round": number, "env": env}',
        "trainer",
    ),
    Break(
        "running.py",
        "* self.cfg.steps - self.done.cut_off",
        "* self.cfg.steps + self.done.cut_off",
        "stops",
    ),
    Break("running.py", "done.cut_off += self", "done.cut_off = self", "stops"),
    Break("running.py", "self.control_cut_off = sum(map(self.cut_off, played))", "pass", "stops"),
    Break("running.py", "self.env_steps_before = self.env_steps\n", "pass\n", "stops"),
    Break("build.py", "max_seeds=cfg.max_seeds", "max_seeds=0", "trainer"),
    Break(
        "running.py",
        "hypervolume(front[:, 0], front[:, 2])",
        "hypervolume(front[:, 0], front[:, 1])",
        "trainer",
    ),
    Break(
        "build.py", "shape.slots, cfg.seed, len(names))", "shape.slots, 0, len(names))", "trainer"
    ),
    Break("build.py", "SubsetRows(cfg.attribution.pairs,", "SubsetRows(True,", "trainer"),
    Break(
        "build.py",
        "arrival_orders(num_slots, samples, cfg.seed,",
        "arrival_orders(num_slots, samples, 0,",
        "trainer",
    ),
    Break(
        "build.py",
        "allowed[list(blueprint_codes(list(cfg.task.blueprints)))] = True",
        "allowed[1:8] = True",
        "trainer",
    ),
    Break(
        "build.py",
        "split=[]), counts, cfg.steps, own)",
        "split=[]), counts, cfg.steps + 1, own)",
        "trainer",
    ),
    Break(
        "build.py",
        "for stage in cfg.lifecycle.detached_stages)",
        'for stage in ("training", "blending"))',
        "trainer",
    ),
    Break(
        "running.py",
        '"collect_seconds": collect_seconds,',
        '"collect_seconds": collect_seconds + update_seconds,',
        "trainer",
    ),
    Break("running.py", "done.seeds.get(name, 0) + count for", "count for", "trainer"),
    Break(
        "running.py",
        "torch.tensor(done.front + result.points,",
        "torch.tensor(result.points,",
        "trainer",
    ),
    Break("build.py", "cfg.policy.ppo.floor_penalty_rounds,", "cfg.rounds,", "trainer"),
    Break("running.py", 'rollbacks=done.seeds.get("rollbacks", 0)', "rollbacks=0", "trainer"),
    Break(
        "running.py", "wall_seconds=time.monotonic() - self.started", "wall_seconds=0.0", "trainer"
    ),
    Break("running.py", "self.watch.load_state_dict(saved.watch)", "pass", "resume"),
    Break("running.py", "            resume.cut_back(self.folder, done)\n", "", "resume"),
    Break(
        "running.py",
        "self.done = saved.progress",
        "self.done = resume.Progressed(saved.progress.rounds_done)",
        "resume",
    ),
    Break("running.py", "[-self.cfg.control_rounds :]", "[-1:]", "trainer"),
    Break("running.py", "self.done.rounds_done - len(recent)", "0", "trainer"),
    Break("controls.py", "world.seed, world.images", "cfg.seed, world.images", "control"),
    Break("controls.py", "played._replace(topology=grown.topology)", "played", "control"),
    Break("env/topology.py", "slots.running & (slots.alpha > 0)", "slots.running", "control"),
    Break("env/topology.py", "germinated=totals.germinated + count, ", "", "control"),
    Break(
        "env/world.py",
        "self.weights, self.rules.nets.shape, everyone, fossil, torch",
        "self.weights, self.rules.nets.shape, everyone, fossil & False, torch",
        "control",
    ),
    Break("nets/model/flops.py", "PASSES = 3", "PASSES = 2", "control"),
    Break(
        "env/parameters.py", "slots.running, _of_residents", "slots.live, _of_residents", "metrics"
    ),
    Break(
        "ops/metrics.py",
        "flop_per_image(before, ",
        "flop_per_image(result.state.slots, ",
        "metrics",
    ),
    Break("ops/verdict.py", "self.accuracy.low > 0", "self.accuracy.mean > 0", "control"),
    Break(
        "evaluation.py", "root=cfg.data_root or made.data.root", "root=made.data.root", "evaluation"
    ),
    Break(
        "evaluation.py",
        "mean_interval(values, cfg.confidence)",
        "mean_interval(values, 0.9)",
        "evaluation",
    ),
    Break(
        "evaluation.py",
        'made.compute.precision if asked == "auto" else asked',
        "asked",
        "evaluation",
    ),
    Break(
        "env/reward_terms.py", "growth = (parameters - host)", "growth = parameters", "evaluation"
    ),
    Break(
        "env/reward_terms.py",
        "growth.clamp(min=0))).clamp(max=most)",
        "growth.clamp(min=0)))",
        "evaluation",
    ),
    Break(
        "evaluation.py",
        "difference_interval(scores[name].net, scores[names[0]].net,",
        "difference_interval(scores[names[0]].net, scores[name].net,",
        "evaluation",
    ),
    Break(
        "evaluation.py",
        "deterministic=cfg.deterministic,\n",
        "deterministic=made.policy.deterministic,\n",
        "evaluation",
    ),
    Break("evaluation.py", "envs=cfg.envs or made.envs", "envs=made.envs", "evaluation"),
    Break(
        "evaluation.py",
        "Round(episode, progress, label)",
        "Round(0, progress, label)",
        "evaluation",
    ),
    Break("agent/ppo.py", "Q_SHARE = 0.5", "Q_SHARE = 0.25", "agent"),
    Break("agent/ppo.py", "MAX_SKIPPED = 3", "MAX_SKIPPED = 4", "agent"),
    Break(
        "agent/ppo.py",
        "config.forced_value_weight, 1.0) * rows.valid",
        "config.forced_value_weight, 1.0)",
        "agent",
    ),
    Break(
        "agent/ppo.py",
        "relevant_heads(rows.effective_op) & rows.valid",
        "relevant_heads(rows.action.op) & rows.valid",
        "agent",
    ),
    Break("agent/ppo.py", "go = finite & ~stopped", "go = finite", "agent"),
    Break(
        "agent/ppo.py", "own(normalize_advantages(advantages, valid))", "own(advantages)", "agent"
    ),
    Break(
        "agent/policy.py",
        "torch.where(blueprints < 0, self.embedding.num_embeddings - 1, blueprints)",
        "blueprints.clamp(min=0)",
        "agent",
    ),
    Break("agent/policy.py", 'masks.op, self.floors["op"])', "masks.op, 0.0)", "agent"),
    Break("agent/policy.py", "detached = x.detach()", "detached = x", "agent"),
    Break(
        "agent/policy.py",
        "fresh = reset[start].reshape(1, -1, 1)",
        "fresh = reset[0].reshape(1, -1, 1)",
        "agent",
    ),
    Break("env/world.py", "self.round = number", "self.round = 0", "world"),
    Break("env/world.py", "        reset_loss_scales_(self.weights)\n", "", "world"),
    Break("env/world.py", "sizes.train_samples // sizes.batch_size", "1", "world"),
    Break(
        "ops/metrics.py",
        "terms.get(name).mean() for name",
        "terms.get(name).sum() for name",
        "metrics",
    ),
    Break("ops/metrics.py", "training.mean(1).tolist()", "training[:, 0].tolist()", "metrics"),
    Break(
        "ops/metrics.py", "episodes.num_steps.long()", "episodes.num_steps.long() + 1", "metrics"
    ),
    Break(
        "nets/model/parameters.py",
        "return value + bound * (2 * draws - 1)",
        "return value + bound * draws",
        "nets",
    ),
    Break(
        "nets/model/parameters.py",
        "return Parameter((size,), 1.0 / math.sqrt(fan_in))",
        "return Parameter((size,), 1.0 / fan_in)",
        "nets",
    ),
    Break(
        "nets/model/blueprints.py", "Start(3.0, cleared=True)", "Start(1.0, cleared=True)", "nets"
    ),
    Break(
        "nets/model/parts.py",
        "NARROW = Width(over=4, least=8)",
        "NARROW = Width(over=4, least=4)",
        "nets",
    ),
    Break("nets/model/parts.py", "CHANNELS_PER_GROUP = 16", "CHANNELS_PER_GROUP = 8", "nets"),
    Break(
        "nets/model/parts.py",
        "return ONES.tensor((channels,), 1)",
        "return ZEROS.tensor((channels,), 1)",
        "nets",
    ),
    Break(
        "nets/engines/cpu/sgd.h",
        "g = grad[i] * factor + decay * params[i]",
        "g = (grad[i] + decay * params[i]) * factor",
        "native",
    ),
    Break("nets/engines/cpu/head.h", "logits[k] = h->bias[k] + dot", "logits[k] = dot", "native"),
    Break(
        "nets/engines/cpu/blend.h",
        "kept = splat(cut || s->flags & REPLACED ? 1.0f - factor : 1.0f)",
        "kept = splat(1.0f)",
        "native",
    ),
    Break("nets/engines/cpu/norm.h", "away * away * shrink", "0 * shrink", "native"),
    Break(
        "nets/engines/cpu/train.c",
        "if (!(own->s.flags & FROZEN)) descend_seed",
        "descend_seed",
        "native",
    ),
    Break(
        "nets/engines/cpu/train.c",
        "0.8 * (of.exploding / of.tensors)",
        "0.5 * (of.exploding / of.tensors)",
        "native",
    ),
    Break("nets/engines/cpu/validate.c", "if (net.label < 0) continue;", "", "native"),
    Break("env/reward_modes.py", "RANSOM_CONTRIBUTION = 0.1", "RANSOM_CONTRIBUTION = 1.0", "env"),
    Break("env/reward_modes.py", "/ 100 - cost).clamp(-1, 1)", "/ 100 - cost).clamp(0, 1)", "env"),
    Break(
        "env/reward_modes.py",
        "inputs.seed_age < cfg.early_prune_threshold",
        "inputs.seed_age <= cfg.early_prune_threshold",
        "env",
    ),
    Break(
        "env/reward_modes.py",
        "(inputs.seed_age < loss.grace_steps)",
        "(inputs.seed_age <= loss.grace_steps)",
        "env",
    ),
    Break(
        "env/reward_modes.py",
        "payment = raw.clamp(-cfg.negative_drip_ratio * cfg.max_drip_per_step, ",
        "payment = raw.clamp(-cfg.max_drip_per_step, ",
        "env",
    ),
    Break("env/reward.py", "max(\n        host, cfg.rent_host_params_floor\n    )", "host", "env"),
    Break(
        "env/reward.py",
        '"loss_delta": -signals.loss_delta',
        '"loss_delta": signals.loss_delta',
        "env",
    ),
    Break(
        "env/reward.py",
        "drip_paid=torch.where(opened, 0.0, slots.drip_paid + readings.drip_payment)",
        "drip_paid=slots.drip_paid + readings.drip_payment",
        "env",
    ),
    Break("env/reward_terms.py", "        & (discount >= 0.5)\n", "", "env"),
    Break("env/reward_terms.py", "(inputs.stage_age >= 2)", "(inputs.stage_age >= 1)", "env"),
    Break("env/governor.py", "RECOVERED_SHARE = 0.6", "RECOVERED_SHARE = 0.8", "env"),
    Break(
        "env/governor.py",
        "((state.signals.step + 1) % cfg.snapshot_steps == 0)",
        "(state.signals.step % cfg.snapshot_steps == 0)",
        "env",
    ),
    Break(
        "env/governor.py", "prune_penalty * removed.sum(1)", "prune_penalty * removed.any(1)", "env"
    ),
    Break(
        "env/governor.py", "ablated=measured.ablated & trusted", "ablated=measured.ablated", "env"
    ),
    Break("nets/model/own_module.py", "manual_seed(seed)", "manual_seed(0)", "own"),
    Break(
        "nets/model/own_module.py",
        "fork_rng(devices=[])",
        "fork_rng(devices=[], enabled=False)",
        "own",
    ),
    Break("nets/own_blueprints.py", "NUM_BLUEPRINTS + place", "NUM_BLUEPRINTS + 1 + place", "own"),
    Break("agent/policy.py", "rows[list(CNN_BLUEPRINTS)].mean(0)", "rows.mean(0)", "own"),
    Break("env/outcome.py", "costs.seed[:, code] / max", "costs.seed[0, code] / max", "own"),
    Break(
        "env/reward.py",
        "else state.totals.replace(pending_hindsight=nothing)",
        "else state.totals",
        "own",
    ),
    Break(
        "agent/own_agents.py",
        "faults or illegal_choices(decision.action, view.masks)",
        "faults",
        "own",
    ),
    Break("ops/pretrained.py", "facts |= {OWN: own} if own else {}", "facts |= {}", "own"),
    Break("controls.py", "plain = _without_own(cfg)", "plain = cfg", "own"),
    Break("conformance.py", "if not torch.equal(out, second):", "if False:", "own"),
    Break(
        "simulator.py",
        "agent.start(self.num_envs, self.device)\n",
        "agent.start(self.num_envs, self.device)\n        self.env.reset(0)\n",
        "simulator",
    ),
    Break("simulator.py", "restart(memory, fresh, seen.restarted)", "memory", "simulator"),
    Break(
        "simulator.py",
        "self._build(seed)\n            self._next_round = 0",
        "self._next_round = 0",
        "simulator",
    ),
    Break("simulator.py", "self._next_round += 1", "self._next_round += 2", "simulator"),
    Break("simulator.py", "info._replace(illegal=checked.illegal)", "info", "simulator"),
    Break(
        "simulator.py",
        "standing_of(before, before if after is not None else result.state)",
        "standing_of(before, before)",
        "simulator",
    ),
    Break(
        "simulator.py",
        (
            "self._seen = self._standing = None\n        with "
            "threads(self.settings.compute.threads):\n            result"
        ),
        "with threads(self.settings.compute.threads):\n            result",
        "simulator",
    ),
    Break("simulator.py", 'Watched("policy", agent)', "agent", "simulator"),
    Break(
        "simulator.py", "slots = self.state.slots[env]", "slots = self.state.slots[0]", "simulator"
    ),
    Break("simulator.py", "if slots.contribution_known[at] else None", "", "simulator"),
    Break(
        "simulator.py",
        "policy in POLICIES or is_reference(policy)",
        "policy in POLICIES",
        "simulator",
    ),
    Break("simulator.py", "name=policy, init=SCRATCH", "name=policy", "simulator"),
    Break("simulator.py", "*NO_LEARNER, *overrides", "*overrides", "simulator"),
    Break(
        "actions.py", "head.placeholder) for head in HEADS}", "0) for head in HEADS}", "simulator"
    ),
    Break(
        "actions.py",
        "found.is_floating_point() or found.is_complex()",
        "found.is_complex()",
        "simulator",
    ),
    Break(
        "actions.py",
        "return Checked(obeyed, ~legal)",
        "return Checked(action, ~legal)",
        "simulator",
    ),
    Break("actions.py", "if raising else []", "if False else []", "simulator"),
    Break("agent/legal.py", "matters & legal_op & ~_offered", "legal_op & ~_offered", "simulator"),
    Break("agent/legal.py", "(inside == choice) & mask", "mask", "simulator"),
    Break(
        "agent/legal.py",
        'heads[HEAD_NAMES.index("op")] = ~legal_op',
        "heads[0] = ~legal_op",
        "simulator",
    ),
    Break("agent/controller.py", 'spec["heads"]["blueprint"]', "13", "simulator"),
    Break(
        "agent/controller.py",
        "head_sizes(len(slots), len(blueprints))",
        "head_sizes(len(slots))",
        "simulator",
    ),
    Break("runs.py", "tuple(map(name_in, names))", "tuple(names)", "simulator"),
    Break("compose.py", "instances.update(held)", "pass", "simulator"),
    Break("compose.py", "_back(store.repo, schemas)", "pass", "simulator"),
    Break("compose.py", "BaseContainer._resolvers = resolvers", "pass", "simulator"),
    Break(
        "compose.py",
        "check_overrides(overrides, TrainConfig, groups_in(config_dir()))",
        "pass",
        "simulator",
    ),
    Break("env/joint.py", "| ~read)", "& read)", "simulator"),
    Break("env/joint.py", "legal | (self.op == Op.WAIT)", "legal", "simulator"),
    Break("env/joint.py", "& masks.slot_by_op[:, self.op, self.slot]", "", "simulator"),
    Break("env/joint.py", "elif op not in head.ops:", "elif False:", "simulator"),
    Break(
        "adapters/flat.py",
        "head_sizes(len(sim.slots), len(sim.world.rules.blueprints))",
        "head_sizes(len(sim.slots))",
        "simulator",
    ),
    Break(
        "adapters/flat.py",
        "torch.where(where, old, new)",
        "torch.where(where, new, old)",
        "adapters",
    ),
    Break(
        "adapters/flat.py",
        "info = fresh._replace(illegal=info.illegal)",
        "info = fresh",
        "adapters",
    ),
    Break("adapters/flat.py", "if go_on and over:", "if over:", "adapters"),
    Break("adapters/flat.py", "truncated & ~terminated", "truncated", "adapters"),
    Break("adapters/flat.py", "== Blueprint.NOOP)", "== Blueprint.NOOP + 1)", "adapters"),
    Break(
        "adapters/flat.py",
        "observation.blueprints[:, :, None] == self.codes",
        "observation.blueprints[:, :, None] > self.codes",
        "adapters",
    ),
    Break(
        "adapters/flat.py",
        'play_settings(experiment, (), settings), "wait")',
        'play_settings(experiment, (), settings), "random")',
        "adapters",
    ),
    Break(
        "arguments.py",
        "one for one in given if one not in LONE_FLAGS",
        "one for one in arguments",
        "command",
    ),
    Break("arguments.py", "if key in groups:\n        return", "", "command"),
    Break("arguments.py", "[*known, *groups])", "known)", "command"),
    Break("arguments.py", 'and "/" not in key', "", "command"),
    Break("arguments.py", 'key[:1] not in ("-", "+", "~")', 'key[:1] not in ("-", "~")', "command"),
    Break(
        "ops/statistics.py",
        "(len(p_values) - place) * p_values[index]",
        "len(p_values) * p_values[index]",
        "compare",
    ),
    Break("ops/statistics.py", "highest = max(highest, min(", "highest = max(0.0, min(", "compare"),
    Break("ops/statistics.py", "        if value != 0\n", "", "compare"),
    Break("ops/comparison.py", "SIGNIFICANCE / comparisons)", "SIGNIFICANCE)", "compare"),
    Break("ops/comparison.py", "1 - 3 / (4 * (len", "1 - 0 / (4 * (len", "compare"),
    Break(
        "ops/comparison.py",
        "self.corrected < SIGNIFICANCE and self.interval.low",
        "self.p < SIGNIFICANCE and self.interval.low",
        "compare",
    ),
    Break("compare.py", '"resume=auto")', '"name=study")', "compare"),
    Break("compare.py", "if all(seed in runs for", "if any(seed in runs for", "compare"),
    Break("compare.py", '"net": ("grown", "net")', '"net": ("grown", "accuracy")', "compare"),
    Break(
        "compare.py", '"round": number, "order": order', '"round": number, "order": []', "compare"
    ),
    Break("lockstep.py", "due = due[:: -1 if behind % 2 else 1]", "due = due[::1]", "lockstep"),
    Break("lockstep.py", "if player.rounds_done == behind]", "]", "lockstep"),
    Break(
        "lockstep.py",
        "                        players[other].save()\n",
        "                        pass\n",
        "lockstep",
    ),
    Break("lockstep.py", "if players[name].unfinished]", "]", "lockstep"),
    Break(
        "lockstep.py",
        "            player.job.requests = requests\n",
        "            pass\n",
        "lockstep",
    ),
    Break(
        "lockstep.py",
        "                        if players[name].play():\n                            continue\n",
        "                        players[name].play()\n",
        "lockstep",
    ),
    Break("lockstep.py", "        failed[name] = str(error)\n", "        pass\n", "lockstep"),
    Break("lockstep.py", "                ended(self.job, end.value)\n", "", "lockstep"),
    Break(
        "ops/session.py",
        "        with logging_to(self._handlers):\n",
        "        with logging_to(()):\n",
        "lockstep",
    ),
    Break(
        "env/reward.py", "settings.split.place == place", "settings.split.place != place", "split"
    ),
    Break("env/reward.py", "select(mine, other_paid, paid)", "paid", "split"),
    Break("build.py", "% len(places)]", "% 1]", "split"),
    Break(
        "ops/metrics.py",
        "mine = torch.tensor([one == mode for one in modes])",
        "mine = torch.tensor([one != mode for one in modes])",
        "split",
    ),
    Break("ops/metrics.py", 'line | {"reward_mode": mode}', "line", "split"),
    Break("env/config.py", "self.drip_fraction == 0 or not others,", "True,", "split"),
    Break("sweep/summary.py", "return not left and bool(jobs)", "return bool(jobs)", "sweeps"),
    Break(
        "sweep/jobs.py",
        "settled = job.ended(FAILED, message=_one_line(error))",
        "settled = job",
        "sweeps",
    ),
    Break("sweep/jobs.py", "if settled is not None:", "if False:", "sweeps"),
    Break("sweep/resolvers.py", "return number % count", "return number", "sweeps"),
    Break("sweep/summary.py", 'hydra.sweeper["_target_"] != BASIC', "True", "sweeps"),
    Break("sweep/jobs.py", "if record.status == BEGUN:", "if False:", "launchers"),
    Break(
        "sweep/jobs.py",
        "        Thread(target=_stop_with_parent, daemon=True).start()\n",
        "",
        "launchers",
    ),
    Break("sweep/jobs.py", "            process.send_signal(number)\n", "", "launchers"),
    Break("ops/start.py", 'if settings.resume != "auto":', "if True:", "sweeps"),
    Break(
        "report/study.py",
        'p_value(number(row, "corrected") or 0.0)',
        'p_value(number(row, "p") or 0.0)',
        "compare",
    ),
    Break(
        "report/study.py",
        "run.path.resolve().parent.parent for run",
        "run.path.resolve().parent for run",
        "compare",
    ),
    Break("report/details.py", "_study(study) if study else ", "", "compare"),
    Break("compare.py", '["report=false", *self.common', "[*self.common", "compare"),
    Break(
        "env/world.py",
        "self._keys = dict[int, Tensor]()",
        'self._keys = vars(self).get("_keys", {})',
        "world",
    ),
    Break("ops/replay.py", "            copy_all_(self.changed, before)\n", "", "replay"),
    Break("ops/replay.py", "            copy_all_(self.changed, after)\n", "", "replay"),
    Break("ops/replay.py", "except (*FAULTS, UserError) as", "except FAULTS as", "replay"),
    Break("ops/replay.py", "if self.apart > TOLERANCE:", "if False:", "replay"),
    Break(
        "ops/replay.py",
        "[*tree_leaves(given), *self.changed], wanted)",
        "*zip(*zip(tree_leaves(given), wanted)))",
        "replay",
    ),
    Break("ops/replay.py", "    gc.collect()  # kept steps hold what holds them\n", "", "replay"),
    Break(
        "ops/replay.py",
        'if device.type == "cuda" else []):',
        'if device.type == "cuda" else [], False):',
        "replay",
    ),
    Break(
        "ops/replay.py",
        "(one.name for one in found if not one.dropped)",
        "(one.name for one in found)",
        "replay",
    ),
    Break(
        "ops/replay.py",
        'take them together" if num_ranks > 1',
        'take them together" if False',
        "replay",
    ),
    Break("ops/replay.py", "        if not self.dropped:\n", "        if True:\n", "replay"),
    Break("ops/replay.py", "        num_ranks > 1,\n", "        False,\n", "replay"),
    Break("build.py", "steps=replay.steps(STATE, device))", "steps=None)", "replay"),
    Break(
        "build.py", "for part in (POLICY, GRADIENTS))", "for part in (POLICY, POLICY))", "replay"
    ),
    Break(
        "running.py",
        'LOGGER.warning("graphs   %s", dropped)',
        'LOGGER.info("graphs   %s", dropped)',
        "replay",
    ),
    Break("nets/graphs.py", 'return None if setting == "auto" else', "return", "replay"),
    Break("nets/graphs.py", "if not capturing or variant in kept.graphs:", "if True:", "graphs"),
    Break("nets/graphs.py", "            self._recorder = None\n", "", "graphs"),
    Break("nets/graphs.py", "if not capturing or variant", "if variant", "graphs"),
    Break("nets/graphs.py", " and target.shape == source.shape", "", "graphs"),
    Break("nets/permutation.py", "        if number % 2:", "        if number:", "orders"),
    Break(
        "nets/permutation.py",
        "torch.where(found < size, found, ",
        "torch.where(found < 0, found, ",
        "orders",
    ),
    Break("nets/data.py", "self.held = num_envs * ", "self.held = len(keys) * ", "orders"),
    Break(
        "ops/collect.py",
        "while self.arriving and self.arriving[0].here:",
        "while self.arriving:",
        "arriving",
    ),
    Break("ops/collect.py", "        self.arriving[-1].wait()\n", "", "arriving"),
    Break("nets/engines/gpu/engine.py", "    newborn.begin_(nurseries, seeds, keys)\n", "", "gpu"),
    Break("nets/engines/gpu/tree.py", "2 ** (number + 1)", "2 ** number", "gpu"),
    Break("nets/engines/gpu/roster.py", "(seeds.frozen, FROZEN), ", "", "gpu"),
    Break(
        "nets/engines/gpu/support.py",
        "    if batch_size > MOST_IMAGES:",
        "    if batch_size < 0:",
        "gpu",
    ),
    Break(
        "nets/engines/gpu/kernels/seed_weights.py",
        "tl.program_id(2) // each == slot:",
        "slot == 0:",
        "gpu",
    ),
    Break("ops/memory.py", "engine if kept and need.what == TRAINED else need", "need", "gpu"),
    Break(
        "telemetry/tracking.py",
        "elif line.number > self._tracked.told:",
        "elif line.number:",
        "telemetry",
    ),
    Break(
        "telemetry/tracking.py",
        "read_told(self._path) if goes_on else {}",
        "read_told(self._path)",
        "telemetry",
    ),
    Break(
        "telemetry/recorder.py",
        "for number in sorted(sizes):",
        "for number in sorted(sizes)[::-1]:",
        "telemetry",
    ),
    Break(
        "telemetry/recorder.py",
        "return self._given - self.env_steps",
        "return self._lost",
        "telemetry",
    ),
    Break(
        "report/words.py",
        "if best.accuracy.mean == second.accuracy.mean:",
        "if not best:",
        "telemetry",
    ),
    Break("ranks.py", "self.first_env = self.share(num_envs).start", "self.first_env = 0", "ranks"),
    Break(
        "ranks.py",
        "flat = self.reduced(torch.cat(",
        "flat = (lambda own, _: own)(torch.cat(",
        "ranks",
    ),
    Break(
        "agent/losses.py",
        "iter(total(*(part for mean in means.values() for part in mean)))",
        "iter(part for mean in means.values() for part in mean)",
        "ranks",
    ),
    Break("agent/normalize.py", "for other in others:", "for other in others[:0]:", "ranks"),
    Break("telemetry/recorder.py", "self._recorder.emit(step, numbers.numpy())", "pass", "ranks"),
    Break(
        "ops/metrics.py",
        '"terms": found["terms"] * found["env_steps"]',
        '"terms": found["terms"]',
        "ranks",
    ),
    Break(
        "ops/networks.py",
        "rows = [env - world.ranks.first_env for env in envs]",
        "rows = list(envs)",
        "ranks",
    ),
    Break(
        "ops/torchrun.py",
        "return cores[first:end] or [cores[first]]",
        "return cores[first:end]",
        "ranks",
    ),
    Break(
        "nets/engines/torch/training.py",
        "return host_grad / count, ",
        "return host_grad, ",
        "accumulate",
    ),
    Break(
        "nets/engines/cpu/train.c", "else grad[i] = all * share;", "else grad[i] = all;", "native"
    ),
    Break("probe.py", "replace(cfg.early_stop, min_steps=cfg.steps)", "cfg.early_stop", "plan"),
    Break("plan.py", "AT_MOST * cfg.early_stop.enabled", "AT_MOST", "plan"),
    Break("adapters/flat.py", "not early.enabled or sim.num_envs == 1", "True", "adapters"),
    Break(
        "adapters/flat.py",
        "self.sim.env.after().masks if over else info.masks",
        "info.masks",
        "adapters",
    ),
    Break(
        "adapters/gymnasium.py",
        "turn if terminated and not turn.over",
        "turn if terminated",
        "adapters",
    ),
    Break(
        "ops/metrics.py", "ops=self.sums.ops - waited * over.sum()", "ops=self.sums.ops", "early"
    ),
    Break(
        "ops/metrics.py",
        "flop=torch.where(over, before.flop, self.sums.flop)",
        "flop=self.sums.flop",
        "early",
    ),
    Break("telemetry/rows.py", "return played.kept(rows)", "return rows", "ends"),
    Break("telemetry/rows.py", "if played.all():", "if True:", "ends"),
    Break(
        "telemetry/parquet.py", "Known(values.values[where], values.known[where])", "values", "ends"
    ),
    Break(
        "telemetry/recorder.py",
        "Waiting(int(still_played(numbers).sum())",
        "Waiting(numbers[:, :, 0].size",
        "ends",
    ),
    Break(
        "telemetry/recorder.py",
        "env_steps = int(still_played(numbers).sum())",
        "env_steps = len(numbers)",
        "ends",
    ),
    Break(
        "telemetry/happenings.py",
        "name in ENDINGS)])[ending]",
        "name in ENDINGS[::-1])])[ending]",
        "ends",
    ),
    Break("telemetry/envs_table.py", 'if played.env("over")[0, env] > 0:', "if False:", "ends"),
    Break("report/lanes.py", "or step == last[env])", "or step == max(last.values()))", "reports"),
    Break(
        "report/lanes.py",
        'f", ended early: {early[env]}" if env in early',
        'f", ended early: {early[env]}" if False',
        "ends",
    ),
    Break(
        "ops/collect.py",
        "torch.ones_like(panic) if last else result.state.ending.over",
        "result.state.ending.over",
        "early",
    ),
    Break(
        "ops/collect.py",
        "torch.ones_like(panic) if last else result.state.ending.over",
        "torch.full_like(panic, last)",
        "early",
    ),
    Break(
        "telemetry/happenings.py",
        "played.goes_on if one.where.ndim == 2 else played.goes_on[:, :, None]",
        "True",
        "ends",
    ),
    Break(
        "telemetry/recorder.py",
        "max(self._ranks.of_all(len(self._steps))) - len(self._steps)",
        "0",
        "ranks",
    ),
    Break("telemetry/pack.py", "    numbers[:, OVER] = 1\n", "", "ranks"),
    Break("telemetry/rows.py", "& np.repeat(played.goes_on.ravel(), subset.shape[2])", "", "ranks"),
    Break(
        "agent/diagnostics.py",
        "torch.where(valid, -hidden_rms, -torch.inf)",
        "-hidden_rms",
        "memory",
    ),
    Break(
        "agent/diagnostics.py",
        "counted = torch.where(valid[..., None, None], hidden, 0.0)",
        "counted = hidden",
        "memory",
    ),
    Break(
        "agent/diagnostics.py",
        "    hidden = torch.where(valid[..., None, None], hidden, 0.0)\n",
        "",
        "memory",
    ),
    Break("agent/diagnostics.py", "valid.sum() * units", "valid.sum()", "memory"),
    Break(
        "ops/collect.py",
        "row if over is None else select(over, self.rollout.rows[step], row)",
        "row",
        "early",
    ),
    Break("ops/collect.py", "restart(memory, before, over)", "memory", "early"),
    Break("env/env.py", "self.playing == 0 or self", "self", "early"),
    Break("env/env.py", "self.playing = self.num_envs\n", "pass\n", "early"),
    Break("ops/collect.py", "self.progress.leave_out(whole - played)", "pass", "early"),
    Break(
        "ops/collect.py",
        "self.progress.leave_out(left * world.ranks.all_envs(num_envs))",
        "pass",
        "early",
    ),
    Break("ops/collect.py", "self.metrics.leave_out(left * num_envs)", "pass", "early"),
    Break("ops/collect.py", "] * left", "] * 1", "early"),
    Break("ops/metrics.py", "self.left_out = self.left_out + env_steps", "pass", "early"),
    Break("ops/metrics.py", "self.env_steps += env_steps\n", "pass\n", "early"),
    Break("ops/progress.py", '"", total=self._pace.total', '""', "progress"),
    Break("ops/progress.py", "total=self._pace.total,", "total=self._pace.done,", "progress"),
    Break("trainer.py", "* cfg.steps - job.done.cut_off", "* cfg.steps", "stops"),
    Break(
        "trainer.py",
        "done=job.env_steps,",
        "done=job.done.rounds_done * cfg.envs * cfg.steps,",
        "stops",
    ),
    Break(
        "env/step.py",
        "state = held(over, _at_rest(before), state)\n        due = due & ~over",
        "pass",
        "early",
    ),
    Break("plan.py", "(self.took.free - self.run_memory) / self", "self.took.free / self", "plan"),
    Break("plan.py", "min(cfg.control_rounds, cfg.rounds)", "cfg.control_rounds", "plan"),
    Break("plan.py", "cfg.ranks * rounds // played", "cfg.ranks * rounds", "plan"),
    Break("plan.py", "kept // written", "kept", "plan"),
    Break(
        "plan.py", "(large[1] - small[1]) / (large[0] - small[0])", "large[1] / large[0]", "plan"
    ),
    Break(
        "plan.py", "self.cfg.ranks * (share(self.cfg).envs + more)", "self.cfg.envs + more", "plan"
    ),
    Break("plan.py", "free=min(took.free for took in ranks)", "free=most.free", "plan"),
    Break("plan.py", "free // ranks - took.program", "free - took.program", "plan"),
    Break("plan.py", "cfg.ranks * kept // written", "kept // written", "plan"),
    Break("probe.py", "return found[1:] or found", "return found", "plan"),
    Break("probe.py", "        self.rounds += 1\n", "        pass\n", "plan"),
    Break("probe.py", "last = seconds if full and place > 0 else last", "last = seconds", "plan"),
    Break(
        "ops/memory.py",
        "max((need.size for need in parts if need.passing), default=0)",
        "0",
        "room",
    ),
    Break("ops/memory.py", "free // beside", "free", "room"),
)


def copy_of(root: Path, folder: Path) -> Path:
    """The files that git tracks in the checkout `root`, as they are now, in `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target)
    return folder


def red_test(checkout: Path, guard: str) -> str:
    """The first test of the group `guard` that fails in `checkout`, or the error before any; empty
    where none does.
    """
    vectors = os.environ.get("ESPER_SOA_VECTORS", str(ROOT.parent / "shared" / "vectors"))
    env = os.environ | {
        "PYTHONPATH": str(checkout),
        "ESPER_SOA_VECTORS": vectors,
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *GUARDS[guard].split(),
    ]
    try:
        done = subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} seconds"
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1].removeprefix("tests/") if found else f"status {done.returncode}"


def broken(checkout: Path, row: Break) -> str:
    """What went red with the row's line broken in `checkout`; empty where nothing did."""
    path = checkout / "esper_soa" / row.path
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(row.before, row.after, 1), encoding="utf-8")
    try:
        return red_test(checkout, row.guard)
    finally:
        path.write_text(whole, encoding="utf-8")


def line(row: Break, red: str) -> str:
    """The row of the table."""
    number = (ROOT / "esper_soa" / row.path).read_text(encoding="utf-8").split(row.before)[0].count(
        "\n"
    ) + 1
    before, after = (" ".join(text.split()).replace("|", "\\|") for text in (row.before, row.after))
    change = f"`{before}` | `{after}`" if after else f"`{before}` | (gone)"
    return f"| {row.path}:{number} | {change} | {red or 'GREEN'} |"


def main() -> None:
    """Break, test, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="lines at a time, each in a copy of its own"
    )
    parser.add_argument("--only", default="", help="rows of the files that begin with this")
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    rows = [row for row in BREAKS if row.path.startswith(options.only)]
    gone = [
        row
        for row in rows
        if row.before not in (ROOT / "esper_soa" / row.path).read_text(encoding="utf-8")
    ]
    if gone:
        sys.exit(
            "\n".join(
                f"error: {row.path} has no {row.before!r}: bring the table up to date"
                for row in gone
            )
        )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(copy_of(ROOT, Path(folder) / str(job)))

        def tried(row: Break) -> str:
            checkout = copies.get()
            begun = time.monotonic()
            try:
                red = broken(checkout, row)
            finally:
                copies.put(checkout)
            print(f"{time.monotonic() - begun:5.0f} s", line(row, red), flush=True)
            return red

        reds = list(pool.map(tried, rows))
    green = sum(not red for red in reds)
    table = ["| place | line | broken | red |", "|---|---|---|---|", *map(line, rows, reds)]
    summary = f"{len(rows)} lines broken one at a time, {len(rows) - green} red, {green} green."
    if options.write:
        title = (
            "# Lines broken on purpose\n\nMade by `python tests/breaks.py --write tests/BREAKS.md`."
        )
        options.write.write_text(
            f"{title} {summary}\n\n" + "\n".join(table) + "\n", encoding="utf-8"
        )
    print(summary)
    sys.exit(1 if green else 0)


if __name__ == "__main__":
    main()
