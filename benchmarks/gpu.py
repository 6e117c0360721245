"""Everything that only a GPU can show, in one command that is given again until all is done, eight
minutes at a time:

    python -m benchmarks.gpu

Parity with the CPU, waits of the host inside an env-step, the kernels' own tests, EPS and images
per second at E10 (T=4608, V=1000, three live seeds, all eight subsets) beside the plain loop, from
the true default on, mixtures of kinds, N=64 against N=1, and the ladder of what makes it fast. What
a call has done is kept in the file --state and not done again for the same commit and device; a
task that a call's time cuts off is the first of the next. Status 3 means that there is more to do.
Prints a table and, once all is done, one JSON line, which is also appended to
benchmarks/results/gpu.jsonl. Ends with an error where there is no GPU; `--device cpu --tiny`
rehearses the whole script with sizes that mean nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_tasks import RUNGS
from benchmarks.records import check_folder, clean, keep, origin
from esper_soa.errors import UserError
from esper_soa.ops.device import resolve_device

ENVS = 64
BATCHES = (32, 512)
LATER = ("compiled",)  # rungs that are left out first, and tried at the smaller batch alone
BASELINE_ENVS = 8  # the plain loop takes as long per env whatever their number
BEST = "graphs+triton"
TOGETHER = "triton+graphs+bfloat16"
PART = 470  # seconds of a call
LEAST = 30  # seconds that must be left for a task to be begun
MORE = 3  # exit status
STATE = Path(__file__).parents[1] / "runs" / "gpu_tasks.jsonl"
Records = dict[str, dict]


def names() -> list[str]:
    """Tasks in order of weight: where time runs out, the last are left out."""
    found = [f"parity:{rung}" for rung in ("default", "eager", "graphs", "triton", TOGETHER)]
    found += ["syncs:default", f"syncs:{BEST}"]
    for batch in BATCHES:
        found += [f"rung:{rung}:{ENVS}:{batch}" for rung in RUNGS if rung not in LATER]
        found += [f"baseline:{BASELINE_ENVS}:{batch}"]
    found += [f"mixture:{rung}:{ENVS}:{BATCHES[0]}" for rung in ("default", "eager", BEST)]
    found += [f"rung:{rung}:1:{BATCHES[0]}" for rung in ("graphs", BEST)]
    return [*found, "blocks", *(f"rung:{rung}:{ENVS}:{BATCHES[0]}" for rung in LATER), "tests"]


def run_task(name: str, device: str, tiny: bool, seconds: float) -> dict:
    """What the task found; "ok" says whether it ended well, "error" why not."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_tasks",
        name,
        "--device",
        device,
        *["--tiny"] * tiny,
    ]
    begun = time.monotonic()
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"ok": False, "cut_off": True, "error": f"not done after {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {
            "ok": False,
            "error": (done.stderr.strip().splitlines() or ["no output"])[-1],
            "log": done.stderr[-3000:],
        }
    return json.loads(lines[-1]) | {"wall_seconds": time.monotonic() - begun}


def done_before(state: Path, facts: Mapping) -> Records:
    """What earlier calls found, by task; nothing where the code is of no commit."""
    if not clean(str(facts["commit"])) or not state.exists():
        return {}
    lines = [json.loads(line) for line in state.read_text(encoding="utf-8").splitlines()]
    return {line["task"]: line["found"] for line in lines if line["facts"] == facts}


def go_on(
    records: Records, todo: list[str], options: argparse.Namespace, kept: tuple[Mapping, Console]
) -> None:
    """Do the tasks `todo` while there is time, and keep each with the facts it was done under."""
    facts, console = kept
    ending = time.monotonic() + options.seconds
    for name in todo:
        left = ending - time.monotonic()
        first = name == todo[0]  # whatever it is given, it would not get more
        if not first and left < LEAST:
            return
        found = run_task(name, str(facts["machine"]["device"]), options.tiny, left)
        if found.get("cut_off") and not first:
            return
        records[name] = found
        options.state.parent.mkdir(parents=True, exist_ok=True)
        with options.state.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"facts": facts, "task": name, "found": found}) + "\n")
        console.print(f"{name}: {'ok' if found['ok'] else 'failed'}", highlight=False)


def ladder(records: Records, batch: int) -> Iterator[tuple[str, ...]]:
    """A row per rung: EPS, images per second, times the plain loop, times the rung before."""
    loop = records.get(f"baseline:{BASELINE_ENVS}:{batch}", {}).get("eps")
    before = None
    for name, key in [("plain loop", f"baseline:{BASELINE_ENVS}:{batch}")] + [
        (rung, f"rung:{rung}:{ENVS}:{batch}") for rung in RUNGS
    ]:
        record = records.get(key, {})
        if "eps" not in record:
            yield name, str(record.get("error", "left out")), "", "", ""
            continue
        over_loop = f"{record['eps'] / loop:.2f}" if loop else ""
        over_before = f"{record['eps'] / before:.2f}" if before else ""
        yield (
            name,
            f"{record['eps']:.1f}",
            f"{record['images_per_second']:,.0f}",
            over_loop,
            over_before,
        )
        before = record["eps"]


def show(records: Records, console: Console) -> None:
    """Tables for people."""
    for batch in BATCHES:
        table = Table(
            "B=" + str(batch),
            "EPS",
            "images/s",
            "over plain loop",
            "over row above",
            title_justify="left",
        )
        for row in ladder(records, batch):
            table.add_row(*row)
        console.print(table)
    for rung in ("graphs", BEST):
        many, one = (records.get(f"rung:{rung}:{envs}:{BATCHES[0]}", {}) for envs in (ENVS, 1))
        if "seconds" in many and "seconds" in one:
            ratio = many["seconds"] / one["seconds"]
            console.print(
                f"{rung}: an env-step of N={ENVS} takes {ratio:.2f} times that of N=1 at "
                f"B={BATCHES[0]}"
            )
    for key, value in records.get("blocks", {}).items():
        if isinstance(value, Mapping):
            console.print(
                f"block {key}: torch {value['torch_ms']:.3f} ms, Triton {value['triton_ms']:.3f} ms"
            )
    for rung in ("default", "eager", BEST):
        alike, mixed = (
            records.get(f"{kind}:{rung}:{ENVS}:{BATCHES[0]}", {}) for kind in ("rung", "mixture")
        )
        if "seconds" in alike and "seconds" in mixed:
            ratio = mixed["seconds"] / alike["seconds"]
            console.print(
                f"{rung}: seeds of all kinds take {ratio:.2f} times what seeds of one kind take"
            )
    for name, record in records.items():
        verdict = "ok" if record["ok"] else "FAILED: " + str(record.get("error", record))
        detail = record.get("skipped") or record.get("summary") or record.get("distance", "")
        console.print(f"{name:28} {verdict} {detail}", markup=False, highlight=False)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes for a rehearsal; the figures mean nothing"
    )
    parser.add_argument("--only", default="", help="only the tasks whose name starts with this")
    parser.add_argument("--seconds", type=float, default=PART, help="time of this call")
    parser.add_argument(
        "--state", type=Path, default=STATE, help="file of what earlier calls have done"
    )
    parser.add_argument(
        "--results",
        default="benchmarks/results",
        help="folder of the results; '' = only print them",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all went well, 1 a task failed, 2 there is no GPU."""
    options = options_of(arguments)
    try:
        device = resolve_device(options.device)
    except UserError as error:
        print(f"error: this benchmark needs a CUDA GPU. {error}", file=sys.stderr)
        return 2
    if device.type != "cuda" and not options.tiny:
        print("error: on a CPU this script can only be rehearsed: add --tiny", file=sys.stderr)
        return 2
    try:
        check_folder(options.results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 140)
    head = origin("gpu", device)
    wanted = [name for name in names() if name.startswith(options.only)]
    facts = {"commit": head["commit"], "machine": head["machine"], "tiny": options.tiny}
    records = done_before(options.state, facts)
    go_on(records, [name for name in wanted if name not in records], options, (facts, console))
    show(records, console)
    missing = [name for name in wanted if name not in records]
    if missing:
        print(
            f"{len(missing)} of {len(wanted)} tasks are left: give the same command again",
            file=sys.stderr,
        )
        return MORE
    left_out = [name for name in names() if name not in records]
    record = head | {"tiny": options.tiny, "left_out": left_out, "tasks": records}
    if options.results:
        keep(record, options.results, "gpu")
    print(json.dumps(record))
    return 0 if all(one["ok"] for one in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
