"""A record of benchmarks/proof.py with numbers that can be worked out by hand."""

from benchmarks.records import METHOD

PLAYERS = ("learned", "wait", "random", "heuristic", "schedule", "static_final", "static_large")
SEEDS = 10
SIZES = {"train": 4000, "validation": 1000, "test": 1000}


def player(level: float, size: float) -> dict:
    """Two hosts a seed, a point above and below its mean, which is `level` + seed / 10."""
    accuracy = [[level + n / 10 - 1, level + n / 10 + 1] for n in range(SEEDS)]
    return {
        "accuracy": accuracy,
        "validation_accuracy": [[value - 2 for value in hosts] for hosts in accuracy],
        "net": [[value - size / 10_000 for value in hosts] for hosts in accuracy],
        "parameters": [[size - 100, size + 100] for _ in range(SEEDS)],
        "train_flop": [[size * 1e6, size * 1e6] for _ in range(SEEDS)],
    }


def proof_record(name: str = "proof", data: tuple[str, ...] = ("fashion32", "cifar10")) -> dict:
    """Player number p reaches 70 - p / 2 percent with 5,000 + 1,000 p parameters."""
    players = {
        one: player(70 - place / 2, 5000 + 1000 * place) for place, one in enumerate(PLAYERS)
    }
    return {
        "benchmark": "proof",
        "method": METHOD,
        "time": "2026-01-01T00:00:00Z",
        "commit": "1234567",
        "name": name,
        "machine": {"cpu": "a processor", "cores": 2, "torch": "2"},
        "experiment": "cifar_3seed",
        "settings_given": [],
        "settings": {"policy": {"init": "shipped"}},
        "seeds": list(range(20260101, 20260101 + SEEDS)),
        "weights": "abc",
        "train_images": 38_400,
        "data": [{"name": one, **SIZES, "val_images": 900, "players": players} for one in data],
    }


def main_record() -> dict:
    """Two seeds of two hosts: differences +1, +3 and -1, +1."""

    def run(grown: list[float], control: list[float], seconds: float) -> dict:
        return {
            "grown": {"accuracies": grown, "parameters": [9000.0, 11000.0]},
            "control": {"accuracies": control, "parameters": [6418.0, 6418.0]},
            "seconds": seconds,
        }

    runs = [run([71.0, 73.0], [70.0, 70.0], 91.0), run([69.0, 71.0], [70.0, 70.0], 84.6)]
    return {
        "benchmark": "proof_main",
        "method": METHOD,
        "time": "2026-01-01T00:00:00Z",
        "commit": "1234567",
        "name": "proof_main",
        "machine": {"cpu": "a processor", "cores": 2, "torch": "2"},
        "seeds": [101, 102],
        "command": "python -m esper_soa.train +experiment=cifar_3seed",
        "data": [{"name": "fashion32", **SIZES, "runs": runs}],
    }
