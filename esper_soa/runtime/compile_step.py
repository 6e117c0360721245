"""Compiles the kernels of an env-step ahead of time, in a process of its own.

`python -m esper_soa.runtime.compile_step FOLDER KEY NICENESS` reads pickled rules, makes their
libraries, compares them with the eager kernels over episodes of random play, and puts them into the
cache (step_cache.py). What adds up or rounds otherwise in inductor's own code is left to the
operations of torch. Where a bit differs the cache says so, and the kernels stay eager. A signal, or
COMPILE_SECONDS seconds, ends it: nothing stays behind.
"""

import math
import os
import pickle
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._inductor as inductor
from torch import Tensor
from torch.export import Dim, export

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.env.ahead import (
    ENDING,
    KERNELS,
    NO_VECTORS,
    LibraryError,
    LibraryKernel,
    example_inputs,
    example_values,
    leaves,
    made_up,
    numbers_of,
    rebuild,
    with_numbers,
)
from esper_soa.env.governor import discard_panicked, watch
from esper_soa.env.step import EnvRules, apply_action, initial_state, record_and_observe
from esper_soa.runtime.step_cache import REFUSAL_ENTRY, digests, find, only_compiler, store
from esper_soa.state import View, same_bits
from esper_soa.system import streams
from esper_soa.system.caches import DRAFT_PREFIX, drop_old_drafts
from esper_soa.system.signals import STOP_SIGNALS, Interrupted, signal_handlers
from esper_soa.vocabulary import HEADS

COMPILE_SECONDS = 1800  # seconds
PROOF_ENVS = (1, 7, 64, 300)  # sizes that vectors and blocks of threads end in differently
PROOF_STEPS = 150
# Operations that inductor's code rounds otherwise, or adds up in another order, than torch's.
INEXACT_OPERATIONS = (
    "cos",
    "cumprod",
    "exp",
    "log",
    "log1p",
    "mean",
    "pow",
    "sigmoid",
    "std",
    "sum",
    "tanh",
)
EXACT_SUMMANDS = 3  # torch adds as few in their order, as inductor does
INDUCTOR_OPTIONS: dict[str, str | bool | int] = {
    "cpp.enable_floating_point_contract_flag": "off",  # no product and sum in one rounding
    # Rows have S numbers, fewer than a vector: loads of a part of one cost three times plain loops,
    # which the C++ compiler turns into vectors where it can.
    "cpp.simdlen": 1,
    "cpp.dynamic_threads": True,  # the caller's number of threads, not this process'
    # dearer than the two files that would use them
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",  # three quarters are checks that nobody makes
    **NO_VECTORS,
}
DYING = (signal.SIGTERM, signal.SIG_DFL)  # says nothing


def compile_kernel(name: str, rules: EnvRules, draft: Path) -> None:
    """Make the files of the kernel in `draft`, for any numbers, N and env-steps per episode."""
    rules, num_envs = example_sizes(rules)
    inputs = example_inputs(rules, num_envs)[[*KERNELS].index(name)]

    class FlatKernel(torch.nn.Module):
        """The kernel over the tensors of its records."""

        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            tensors = iter(given)
            records = rebuild(inputs, tensors)
            return tuple(leaves(KERNELS[name](with_numbers(rules, tensors), *records)))

    tensors = tuple(leaf.contiguous() for leaf in leaves(inputs))
    sizes = {num_envs: Dim("N", min=1), rules.max_steps: Dim("T", min=1)}
    dims = [
        {dim: sizes[size] for dim, size in enumerate(tensor.shape) if size in sizes}
        for tensor in tensors
    ]
    numbers = numbers_of(rules)
    tensors += numbers
    shapes = (*dims, *({} for _ in numbers))
    program = export(FlatKernel(), tensors, dynamic_shapes=(shapes,), strict=False)
    inexact = tuple(f"aten.{operation}." for operation in INEXACT_OPERATIONS)
    for node in program.graph.nodes:
        if str(node.target).startswith(inexact) and not _is_exact(node):
            node.meta["custom"] = {"fallback_to_eager": True}
    path = str(draft / f"{name}{ENDING}")
    try:
        inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=INDUCTOR_OPTIONS
        )
    except RuntimeError as error:  # some kinds cannot be sent to another process
        raise RuntimeError(str(error)) from None


def _is_exact(node: torch.fx.Node) -> bool:
    """Whether inductor's own code for an operation of INEXACT_OPERATIONS gives torch's bits."""
    result = node.meta["val"]
    if not result.is_floating_point():
        return True
    if node.target != torch.ops.aten.sum.dim_IntList:
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return math.prod(shape[dim] for dim in node.args[1]) <= EXACT_SUMMANDS  # type: ignore[union-attr]


def example_sizes(rules: EnvRules) -> tuple[EnvRules, int]:
    """Rules of episodes, and an N, of sizes that nothing else in the kernels has: export would take
    them for the same.
    """
    tensors = *leaves(example_inputs(rules, 1)), *numbers_of(rules)
    sizes = {size for tensor in tensors for size in tensor.shape}
    steps, num_envs, *_ = (number for number in range(11, 200) if number not in sizes)
    return rules._replace(reward=rules.reward.lasting(steps)), num_envs


def differs(rules: EnvRules, folder: Path, num_envs: int) -> str:
    """Where the libraries differ from the eager kernels over an episode; "" where they never do."""
    agent = RandomPolicy()
    state = initial_state(rules, num_envs, torch.device("cpu"))
    envs = torch.arange(num_envs)
    values = example_values(rules, num_envs)
    libraries: dict[str, LibraryKernel] = {}
    for step in range(min(rules.max_steps, PROOF_STEPS)):
        measured = made_up(rules, state, step)
        state, _ = watch(
            state, measured.val_loss, rules.setup.shape.num_classes, cfg=rules.governor
        )
        measured = discard_panicked(measured, state)
        recorded = record_and_observe(rules, state, measured, values=values)
        keys = streams.stream_keys(0, streams.POLICY_SAMPLE, (step,), envs=envs)[:, None]
        noise = streams.uniform(keys, 5000 + torch.arange(len(HEADS)), torch.float32)
        observed, attribution, masks, observation = recorded
        view = View(observed, observation, masks, noise=noise, batch_size=[num_envs])
        action = agent.act(view, ())[0].action
        result = apply_action(rules, observed, attribution, action=action, values=values)
        given = (state, measured, values), (observed, attribution, action, values)
        calls = zip(given, (recorded, result), strict=True)
        for name, (inputs, wanted) in zip(KERNELS, calls, strict=True):
            path = folder / f"{name}{ENDING}"
            libraries.setdefault(name, LibraryKernel(path, rules, inputs, like=wanted))
            if not same_bits(leaves(libraries[name](rules, *inputs)), leaves(wanted)):
                return f"{name} compiled rounds otherwise here (env-step {step} of {num_envs} envs)"
        state = result.state
    return ""


def fill(folder: Path, key: str, rules: EnvRules) -> None:
    """Compile, compare, store; where that fails the cache says why."""
    with tempfile.TemporaryDirectory(prefix=DRAFT_PREFIX, dir=folder) as work_folder:
        work = Path(work_folder)
        draft = work / "draft"
        draft.mkdir(mode=0o700)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
        try:
            fork = get_context("fork")
            count = len(KERNELS)
            with ProcessPoolExecutor(count, fork, signal.signal, DYING) as pool:
                compilations = [pool.submit(compile_kernel, name, rules, draft) for name in KERNELS]
                for compilation in compilations:
                    compilation.result()
            proofs = (differs(rules, draft, num_envs) for num_envs in PROOF_ENVS)
            refusal = next(filter(None, proofs), "")
        except (RuntimeError, ValueError, TypeError, LibraryError, StopIteration) as error:
            refusal = f"inductor failed: {' '.join(str(error).split())[:200]}"
        store(draft, folder, key, manifest={REFUSAL_ENTRY: refusal} if refusal else digests(draft))


def main() -> None:
    """Read the rules and fill the cache, if no other process does so for this key, when those of
    other keys have, within COMPILE_SECONDS.
    """
    _, folder_text, key, niceness_text = sys.argv
    folder = Path(folder_text)
    niceness = int(niceness_text)
    rules = pickle.load(sys.stdin.buffer)
    os.nice(niceness)
    with suppress(OSError):  # a session of its own is weighed by this number, where there is one
        Path("/proc/self/autogroup").write_text(str(niceness))
    torch.set_num_threads(1)

    def stop(number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # compilers that it has started
        raise Interrupted(number)

    signal.alarm(COMPILE_SECONDS)
    with (
        signal_handlers(stop, (*STOP_SIGNALS, signal.SIGALRM)),
        only_compiler(folder, key, wait=niceness == 0) as alone,
        torch.no_grad(),
    ):
        if alone and find(folder, key) is None:
            with only_compiler(folder, wait=True):
                drop_old_drafts(folder)
                fill(folder, key, rules)


if __name__ == "__main__":
    main()
