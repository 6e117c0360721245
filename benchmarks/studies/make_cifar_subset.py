"""Makes the subset of CIFAR-10 that the records call cifar10, from the whole of CIFAR-10.

    python -m benchmarks.studies.make_cifar_subset CIFAR FOLDER     writes the batches to FOLDER
    python -m benchmarks.studies.make_cifar_subset --list FOLDER    prints the list of a subset

CIFAR is what data.root takes. The list, cifar_subset.txt beside this file, has a line for every
image, in order: its batch, and the SHA-256 of its 3,072 bytes, which are 1,024 red, then green,
then blue, row by row.
"""

import pickle
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np

from esper_soa.nets.data.cifar import BATCH_TITLES, parse_pickle, read_cifar10

LIST = Path(__file__).with_name("cifar_subset.txt")


def digests(images: np.ndarray) -> list[str]:
    """The SHA-256 of every image of `images`, uint8 [M, 32, 32, 3]."""
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return [sha256(image.tobytes()).hexdigest() for image in planes]


def listed(folder: Path) -> Iterable[str]:
    """The lines of the list for the batches in `folder`."""
    for name in BATCH_TITLES:
        images, _ = parse_pickle((folder / name).read_bytes(), str(folder / name))
        yield from (f"{name} {digest}" for digest in digests(images))


def make(root: str, folder: Path, lines: Iterable[str]) -> None:
    """Write the images of `lines` from the CIFAR-10 of `root` as batches; SystemExit without one.

    An image that CIFAR-10 has twice is in the subset with the label of its last place.
    """
    train, test, _ = read_cifar10(root)
    known = {}
    for images, labels in (train, test):
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        known |= dict(zip(digests(images), zip(planes, labels.tolist(), strict=True), strict=True))
    batches: dict[str, list[str]] = {name: [] for name in BATCH_TITLES}
    for line in lines:
        name, digest = line.split()
        if digest not in known:
            raise SystemExit(f"{root}: lacks the image {digest} of {name}")
        batches[name].append(digest)
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in batches.items():
        chosen = [known[digest] for digest in wanted]
        content = {
            "batch_label": BATCH_TITLES[name],
            "labels": [label for _, label in chosen],
            "data": np.stack([pixels for pixels, _ in chosen]),
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def main(arguments: list[str]) -> None:
    """Print the list of a subset, or write the subset."""
    if len(arguments) != 2:
        raise SystemExit("usage: python -m benchmarks.studies.make_cifar_subset CIFAR FOLDER")
    if arguments[0] == "--list":
        print(*listed(Path(arguments[1])), sep="\n")
        return
    make(arguments[0], Path(arguments[1]), LIST.read_text(encoding="ascii").splitlines())


if __name__ == "__main__":
    main(sys.argv[1:])
