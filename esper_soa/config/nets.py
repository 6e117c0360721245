"""Settings of host networks and their data, and the slot table that follows. Needs no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from esper_soa.config.paths import holds_only_folders, user_path
from esper_soa.config.ranges import (
    AUTO,
    COUNT,
    WEIGHT,
    EnvNumber,
    Settings,
    choice,
    choices,
    env_choice,
    env_number,
    env_words,
    number,
    numbers,
    word,
)
from esper_soa.config.registry import BLUEPRINT, DATASET, HOST, is_reference, name_in
from esper_soa.system.errors import SettingError, check
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS, SEQUENCE_BLUEPRINTS

IMAGE_SIZE = 32
IMAGE_CHANNELS = 3
MAX_CHANNELS = 8192  # of a block
MAX_POOLS = 5  # that leave one pixel of an image
CNN_BLUEPRINT_NAMES = tuple(BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS)
# Those that can be germinated, each in slots of the kind of features that it takes.
GROWABLE = tuple(BLUEPRINT_NAMES[code] for code in sorted({*CNN_BLUEPRINTS, *SEQUENCE_BLUEPRINTS}))
ATTENTION_HEADS = 4  # of the seeds of transformers that have attention
FOLDER = "folder"  # the data set of class folders of image files
DATASETS = (
    *("auto", "cifar10", "fashion32", "synthetic", "npz", FOLDER, "given", "text", "tinystories"),
)
# those that envs can take in turn
IMAGE_SETS = ("cifar10", "fashion32", "synthetic", "npz", FOLDER)
READING = ("auto", "cifar10", "npz", FOLDER, "text")  # what is at data.root
DATA_NAME = "data.name"
TEXTS = ("text", "tinystories")  # of DATASETS
# Kinds of features, which a seed and the slot that it stands in have in common, by the number of
# axes behind the channels: [B, C], [B, C, T], [B, C, H, W].
VECTORS = "vectors"
SEQUENCES = "sequences"
IMAGES = "images"
TOPOLOGIES = (VECTORS, SEQUENCES, IMAGES)
NPZ = ".npz"  # how a file of own images ends
TXT = ".txt"  # and one of text
SHAPE = ("size", "channels")  # of DataConfig, of the images that hosts see
# of DataConfig, that only own images heed
PREPARATION = ("layout", "resize", "mean", "std", *SHAPE)


@dataclass
class TransformerConfig(Settings, path="task.transformer."):
    """Hosts of text, as esper-lite's TransformerHost in kasmina/host.py."""

    width: int = number(32, 1, MAX_CHANNELS)  # D, numbers of a position
    layers: int = number(3, 1, 1000)  # of attention and MLP each
    heads: int = number(2, 1, MAX_CHANNELS)  # of the attention in each layer
    context: int = number(64, 1, 65_536)  # T, tokens of a sequence
    segments: int = number(3, 1, 64)  # equal numbers of layers, with slot r0c{i} behind segment i
    dropout: float = number(0.0, 0, 1, ends="[)")  # of embeddings, attention weights and layers
    embedding_std: float = number(1.0, 0, 100, ends="(]")  # of the embeddings as they begin
    logits_mib: int = number(64, 1, 65_536)  # MiB of logits per worker, pieces of the losses

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = f"a divisor of {self.path}width={self.width}"
        self.require(self.width % self.heads == 0, "heads", allowed)
        allowed = f"a divisor of {self.path}layers={self.layers}"
        self.require(self.layers % self.segments == 0, "segments", allowed)


class SlotSpec(NamedTuple):
    """Place of a seed slot: row 0 before the pool of its block (after ReLU), row 1 after it."""

    name: str
    row: int
    block: int
    channels: int
    size: int = 0  # of its features along each axis behind the channels
    depth: float = 0.0  # of its block in the host: 0 for the first block, 1 for the last
    axes: int = 2  # behind the channels: 2 of images, 1 of sequences, 0 of vectors

    @property
    def topology(self) -> str:
        """Kind of its features, one of TOPOLOGIES."""
        return TOPOLOGIES[self.axes]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its features of one sample: (C,), (C, T) or (C, H, W)."""
        return (self.channels, *[self.size] * self.axes)

    @property
    def positions(self) -> int:
        """Numbers of a channel."""
        return math.prod(self.shape[1:])


def _chain_widths(task: "TaskConfig") -> range:
    last = task.channels(task.num_blocks - 1)
    return range(task.base_channels, MAX_CHANNELS * task.base_channels // last + 1)


def _chain_slots(task: "TaskConfig", side: int) -> tuple[SlotSpec, ...]:
    blocks = range(task.num_blocks)
    places = [(0, block) for block in blocks]
    places += [(1, block) for block in blocks if task.pooled(block)]
    return tuple(
        SlotSpec(
            f"r{row}c{block}",
            row,
            block,
            channels=task.channels(block),
            size=task.size(block + row, side),
            depth=block / (task.num_blocks - 1),
        )
        for row, block in places
    )


def _check_transformer(task: "TaskConfig") -> None:
    attentive = not {"attention", "flex_attention"}.isdisjoint(task.blueprints)
    allowed = f"a multiple of {ATTENTION_HEADS}, the heads of seeds with attention"
    remedy = "Or leave attention out of task.blueprints."
    even = task.transformer.width % ATTENTION_HEADS == 0
    task.require(even or not attentive, "transformer.width", allowed, remedy=remedy)


def _transformer_widths(task: "TaskConfig") -> range:
    step = math.lcm(task.transformer.heads, ATTENTION_HEADS)
    return range(task.transformer.width, MAX_CHANNELS + 1, step)


def _transformer_slots(task: "TaskConfig", side: int) -> tuple[SlotSpec, ...]:
    cfg = task.transformer
    return tuple(
        SlotSpec(
            f"r0c{segment}",
            0,
            segment,
            channels=cfg.width,
            size=cfg.context,
            depth=segment / max(cfg.segments - 1, 1),
            axes=1,
        )
        for segment in range(cfg.segments)
    )


def _chain_of_width(task: "TaskConfig", width: int) -> "TaskConfig":
    return replace(task, base_channels=width)


def _transformer_of_width(task: "TaskConfig", width: int) -> "TaskConfig":
    return replace(task, transformer=replace(task.transformer, width=width))


class HostKind(NamedTuple):
    """A kind of the package's hosts, as settings know it; nets/model/host.py builds it."""

    sizes: tuple[str, ...]  # settings that make the hosts smaller, their width first
    # all that a host of images of so many pixels a side offers, row-major
    slots: Callable[["TaskConfig", int], tuple[SlotSpec, ...]]
    widths: Callable[["TaskConfig"], range]  # from that of the settings to the largest
    with_width: Callable[["TaskConfig", int], "TaskConfig"]
    check: Callable[["TaskConfig"], None] | None = None  # raises SettingError
    loss_sizes: tuple[str, ...] = ()  # settings that lower the memory of losses; () = the others
    data: str = "auto"  # the data set of data.name=auto without data.root


HOST_KINDS = {
    "chain": HostKind(
        sizes=("task.base_channels", "task.kernel_size"),
        slots=_chain_slots,
        widths=_chain_widths,
        with_width=_chain_of_width,
    ),
    "transformer": HostKind(
        sizes=("task.transformer.width", "task.transformer.layers"),
        slots=_transformer_slots,
        widths=_transformer_widths,
        with_width=_transformer_of_width,
        check=_check_transformer,
        loss_sizes=("task.transformer.logits_mib",),
        data="text",
    ),
}
# Settings that make hosts of a kind smaller, or their losses; a user's host has none.
SIZE_SETTINGS = {name: kind.sizes for name, kind in HOST_KINDS.items()}
LOSS_SETTINGS = {name: kind.loss_sizes for name, kind in HOST_KINDS.items() if kind.loss_sizes}


@dataclass
class TaskConfig(Settings, path="task."):
    """Host architecture and the settings of its training, as esper-lite's kasmina/host.py."""

    name: str = word("cifar_baseline")  # in words, for the table
    # chain: the blocks that the next four settings describe; transformer: what task.transformer
    # describes. Neither does anything for a user's own host.
    host: str = choice("chain", tuple(HOST_KINDS), part=HOST)
    base_channels: int = number(8, 1, MAX_CHANNELS)  # channels of block 0; doubled by every block
    num_blocks: int = number(3, 2, 13)  # convolution, batch norm, ReLU each
    kernel_size: int = number(3, 1, IMAGE_SIZE - 1, note="odd")  # of the convolutions, pixels
    num_pools: int = number(3, 0, MAX_POOLS)  # the first num_pools blocks end in a 2x2 max pool
    # The classes of the data, or more; auto: those of the images; of a transformer tokens.
    num_classes: int | str = number(10, 2, 100_000, auto=True)
    # Where EnvNumber stands, each env can have its own; see config/ranges.py.
    host_lr: EnvNumber = env_number(0.01, 0, 1000, ends="(]")  # learning rate of the host
    seed_lr: EnvNumber = env_number(0.01, 0, 1000, ends="(]")  # of its seeds
    # Learning rates over an episode: as they are, or from there to 0 along half a cosine.
    lr_schedule: str = choice("constant", ("constant", "cosine"))
    # sgd: with momentum; adamw: with two moments, not in Triton (Loshchilov and Hutter 2019).
    optimizer: str = choice("sgd", ("sgd", "adamw"))
    # Momentum of hosts and seeds; the decay of adamw's first moment.
    momentum: EnvNumber = env_number(0.9, 0, 1, ends="[)")
    weight_decay: EnvNumber = env_number(5e-4, 0, 1000)  # of the host; seeds have none
    # Gradient norm per env for the host, per env and slot for seeds.
    max_grad_norm: EnvNumber = env_number(1.0, 0, WEIGHT, note="0 = no clipping")
    gradient_stride: int = number(10, 1, COUNT)  # optimiser steps between measured seed gradients
    # Those that may be germinated; users' own take the codes from 13 on, in this order.
    blueprints: list[str] = choices(CNN_BLUEPRINT_NAMES, GROWABLE, part=BLUEPRINT)
    transformer: TransformerConfig = field(default_factory=TransformerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.kernel_size % 2 == 1, "kernel_size", "odd")
        allowed = f"at most task.num_blocks={self.num_blocks}"
        self.require(self.num_pools <= self.num_blocks, "num_pools", allowed)
        alike = self.optimizer == "sgd" or not isinstance(self.momentum, str)
        allowed = f"one number for all envs with task.optimizer={self.optimizer}"
        self.require(alike, "momentum", allowed)
        last = self.channels(self.num_blocks - 1)
        allowed = f"so small that the last block has at most {MAX_CHANNELS} channels, not {last}"
        remedy = f"Or lower task.base_channels={self.base_channels}."
        self.require(last <= MAX_CHANNELS, "num_blocks", allowed, remedy=remedy)
        kind = HOST_KINDS.get(self.host)
        if kind is not None and kind.check is not None:
            kind.check(self)
        names = [name_in(name) for name in blueprint_names(self.blueprints)]
        for reference in filter(is_reference, self.blueprints):
            allowed = "of another name than every other blueprint"
            remedy = "Records call a blueprint by its name."
            unique = names.count(name_in(reference)) == 1
            check(unique, "task.blueprints", reference, allowed=allowed, remedy=remedy)

    @property
    def classes(self) -> int:
        """The number of classes; SettingError where the data is still to be asked for it."""
        allowed = "a number here, where no images say how many there are"
        self.require(self.num_classes != AUTO, "num_classes", allowed)
        return int(self.num_classes)

    @property
    def host_name(self) -> str:
        """Name of the hosts in messages."""
        return name_in(self.host) if is_reference(self.host) else self.name

    @property
    def widths(self) -> range:
        """Widths of hosts like this one, from that of these to the largest; see `with_width`."""
        return HOST_KINDS[self.host].widths(self)

    def with_width(self, width: int) -> "TaskConfig":
        """The same hosts with another width, the first of `HostKind.sizes`."""
        return HOST_KINDS[self.host].with_width(self, width)

    def channels(self, block: int) -> int:
        """Channels of block `block`, counted from 0: doubled by every block."""
        return self.base_channels * 2**block

    def pooled(self, block: int) -> bool:
        """Whether the block ends in a pool, which halves height and width."""
        return block < self.num_pools

    def size(self, block: int, side: int = IMAGE_SIZE) -> int:
        """Height and width of the block's input and of its feature map before the pool, of images
        of `side` pixels.
        """
        return side // 2 ** min(block, self.num_pools)


def blueprint_names(references: Sequence[str]) -> tuple[str, ...]:
    """Names of blueprints in settings, by code: the package's, then users' own as `references`."""
    return (*BLUEPRINT_NAMES, *filter(is_reference, references))


def lr_factor(schedule: str, step: int, num_steps: int) -> float:
    """The factor of the learning rates of env-step `step` (from 0) of `num_steps`.

    cosine: from 1 to nearly 0, as of Loshchilov and Hutter 2017, without restarts.
    """
    return 1.0 if schedule == "constant" else (1 + math.cos(math.pi * step / num_steps)) / 2


@dataclass
class DataConfig(Settings, path="data."):
    """Which samples, from where, and how an env-step draws them."""

    # auto: what root holds, CIFAR-10, an .npz or class folders, and without root the embedded
    # fashion32, or the embedded text where hosts are transformers; npz: own images from the file
    # root; folder: own images from the files in root, in a folder for each class; given: own images
    # that a program hands over; text: the embedded text, or the files of root; tinystories: stories
    # of Eldan and Li 2023, from the internet; module:name: a data set of your own. Several sets of
    # images, as [cifar10,fashion32]: one for each env, in turn.
    name: str = env_choice("auto", DATASETS, part=DATASET, listed=IMAGE_SETS)
    # Folder or archive of CIFAR-10 (cifar-10-batches-py, or the .tar.gz), .npz or folder of own
    # images, a .txt file or a folder of them, or what a data set of your own reads; "" = none.
    root: str = ""
    # In training. Images: random crop with padding 4, horizontal flip; text: begins anywhere.
    augment: bool = True
    split: bool = False  # the reference's rule: one pass over the data set is split over the envs
    # Share of the training samples that an env draws from; a larger share has all of a smaller.
    share: EnvNumber = env_number(1.0, 0, 1, ends="(]")
    label_noise: EnvNumber = env_number(0.0, 0, 1)  # share of labels that are random in a round
    # Training images set aside for validation, which rewards, gates and observations see; 0 = a
    # fifth of them, at most 5,000. An .npz with val_images brings its own; synthetic images are
    # drawn for it, 0 = as many as test images.
    validation_images: int = number(0, 0, 10_000_000)
    context: int = number(64, 1, 65_536)  # tokens of a sequence of text: task.transformer.context
    # Tokens of text. bytes: every byte of UTF-8 is a token; or a tokenizer.json, as Hugging Face's
    # tokenizers save it, or the name of one on its hub (the extra `text`).
    tokenizer: str = "bytes"
    synthetic_train: int = number(512, 1, 1_000_000)  # images of the synthetic set
    synthetic_test: int = number(256, 1, 1_000_000)  # of its test part
    # Channels of a user's images: nhwc has them last, nchw before height and width.
    layout: str = choice("nhwc", ("nhwc", "nchw"))
    # How they come to size x size: docs/images.md.
    resize: str = choice("auto", ("auto", "pad", "scale", "stretch"))
    size: int = number(
        IMAGE_SIZE, 8, 128, note="a multiple of 4"
    )  # pixels a side, as hosts see them
    channels: int = number(IMAGE_CHANNELS, 1, 3, note="1 or 3")  # that hosts see: grey, or colours
    # Mean of values in [0, 1] that a user's images are normalised by, per channel or for all; [] =
    # that of the images.
    mean: list[float] = numbers((), 0, 1, least=0)
    std: list[float] = numbers((), 0.001, 10, least=0)  # as mean, and given with it

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = not self.split or self.share == 1
        self.require(whole, "share", "1 with data.split=true, which gives every env its part")
        of_images = not (self.is_text or is_reference(self.name))
        allowed = f"0 with data.name={self.name}: only the package's images have it"
        self.require(of_images or self.label_noise == 0, "label_noise", allowed)
        reads = any(name in READING or is_reference(name) for name in env_words(self.name))
        remedy = "Take data.name=cifar10 or data.name=npz for the files there."
        self.require(
            reads or not self.root, "root", f"empty with data.name={self.name}", remedy=remedy
        )
        user_path("data.root", self.root)
        held = self.name != "given" or not self.validation_images
        allowed = "0 with data.name=given: the images handed over have a validation part"
        self.require(held, "validation_images", allowed)
        self.require(self.size % 4 == 0, "size", "a multiple of 4")
        self.require(self.channels != 2, "channels", "1 or 3")
        allowed = f"empty, one number, or one for each of {self.channels} channels"
        self.require(len(self.mean) in (0, 1, self.channels), "mean", allowed)
        allowed = f"as many numbers as {self.path}mean={self.mean}"
        self.require(
            len(self.std) == len(self.mean), "std", allowed, remedy="Give both or neither."
        )
        if self.sets != (self,):  # each has been checked
            self.require(not self.split, "name", "one data set with data.split=true")
            read = set(READING) & {part.name for part in self.sets}
            self.require(len(read) < 2, "name", "a list with one set at most that data.root holds")
            return
        allowed = f"left out with data.name={self.name}"
        remedy = f"It is for own images: data.root=mine{NPZ}"
        for item in fields(self):
            is_default = item.name not in PREPARATION or vars(self)[item.name] in ([], item.default)
            is_shape = self.name == "given" and item.name in SHAPE
            self.require(
                is_default or is_shape or self.is_user_file, item.name, allowed, remedy=remedy
            )

    @property
    def sets(self) -> tuple["DataConfig", ...]:
        """Settings of each data set that envs take in turn; these alone where all have one."""
        names = env_words(self.name)
        roots = {name: self.root if name in READING else "" for name in names}
        sets = (replace(self, name=name, root=root) for name, root in roots.items())
        return (self,) if names == (self.name,) else tuple(sets)

    @property
    def is_text(self) -> bool:
        """Whether the samples are sequences of tokens."""
        return self.name in TEXTS or (self.name == "auto" and self.root.lower().endswith(TXT))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of images as hosts see them."""
        return self.channels, self.size, self.size

    @property
    def is_folder(self) -> bool:
        """Whether the images are files in class folders in `root`."""
        is_auto = self.name == "auto" and self.root != ""
        return self.name == FOLDER or (
            is_auto and holds_only_folders(user_path("data.root", self.root))
        )

    @property
    def is_user_file(self) -> bool:
        """Whether the images are the user's, from the file or folder `root`."""
        is_npz = self.name == "npz" or (self.name == "auto" and self.root.lower().endswith(NPZ))
        return is_npz or self.is_folder


class SubsetRows(NamedTuple):
    """Further subsets to validate where more than subsets.EXACT_SLOTS seeds are ablated.

    Of a code only the bits of ablated seeds count.
    """

    pairs: bool = True  # each two on their own
    codes: tuple[int, ...] = ()  # distinct bit masks over slot numbers


DEFAULT_ROWS = SubsetRows()


def host_slots(task: TaskConfig, side: int = IMAGE_SIZE) -> tuple[SlotSpec, ...]:
    """Every slot that the host offers, row-major (r0c0, r0c1, ..., r1c0, ...): order of actions.

    side: of the images, pixels.
    """
    return HOST_KINDS[task.host].slots(task, side)


def resolve_slots(task: TaskConfig, names: list[str]) -> list[str]:
    """`names` of slots, or the host's first where they are a number; raises SettingError."""
    if len(names) != 1 or not names[0].isdecimal():
        return names
    if is_reference(task.host):
        allowed = f"a list of slots of {task.host_name}, a host of your own"
        raise SettingError("slots", names[0], allowed)
    all_slots = host_slots(task)
    count = int(names[0])
    allowed = f"in [1, {len(all_slots)}] with {task.host_name}, or a list of names"
    check(1 <= count <= len(all_slots), "slots", names[0], allowed=allowed)
    return [spec.name for spec in all_slots[:count]]


def sort_slots(
    task: TaskConfig, names: list[str], host_names: tuple[SlotSpec, ...] | None = None
) -> tuple[SlotSpec, ...]:
    """Slots of the run in row-major order; `names` may come in any order.

    host_names: those of a host that the settings do not describe. Raises SettingError for an empty
    list, a repeated name, or a name that the host does not have.
    """
    host_names = host_slots(task) if host_names is None else host_names
    specs = {spec.name: spec for spec in host_names}
    allowed = f"of {task.host_name}: {', '.join(specs)}"
    check(bool(names), "slots", names, allowed=f"a non-empty list of slots {allowed}")
    unique = len(set(names)) == len(names)
    check(unique, "slots", names, allowed="without repetition", remedy="Name every slot once.")
    for name in names:
        check(name in specs, "slots", name, allowed=f"a slot {allowed}")
    return tuple(spec for name, spec in specs.items() if name in names)
