"""The slots of N networks on a GPU: tables, work places and launches of kernels.

A slot's forward pass is one launch, its backward pass another, and the gradients of the parameters
in all slots a last one, whatever grows there. Features are [N, B, H*W, C].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.kernels.seed import VECTORS, KernelSlot, SlotShape
from esper_soa.nets.engines.gpu.kernels.seed_backward import slot_backward_kernel
from esper_soa.nets.engines.gpu.kernels.seed_forward import slot_branch_kernel, slot_forward_kernel
from esper_soa.nets.engines.gpu.kernels.seed_weights import Share, seed_weights_kernel
from esper_soa.nets.engines.gpu.kernels.tiles import constants, product_precision, rows
from esper_soa.nets.engines.gpu.tile_sizes import lanes_of, padded, slot_tile
from esper_soa.nets.model.blueprints import GATE
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.seeds.pools import row_layout

IMAGES_PER_SPLIT = 8  # of a weight gradient's sum
MAX_SPLITS = 16
PROGRAMS_PER_PROCESSOR = 4
SMALL_PIXEL = 64  # bytes of its channels
SMALL_MAP = 8192  # numbers of an image
FEW_REGISTERS = 168  # of a thread: three programs find room on a multiprocessor
MAX_REGISTERS = 255  # two programs
NO_EAGER_LOADS = "--register-usage-level=0"  # of ptxas, which else spills registers for them


class SlotTable(NamedTuple):
    """The facts of a slot that are the same for all networks."""

    number: int
    num_slots: int  # of a network
    channels: int
    programs: Tensor  # int32 [codes, 1 + parts, FIELDS]
    maps: int
    lanes: int  # channels of a tile
    units: int  # hidden units of a tile
    stride: int  # numbers per pixel of a map: whole vectors of 16 bytes in 16 bits
    gate_at: int
    gate_hidden: int

    @property
    def parts(self) -> int:
        """Most that a blueprint has."""
        return self.programs.shape[1] - 1


class SlotWorkspace(NamedTuple):
    """Memory of a slot for as many images as go through at a time; a batch's until `weights_`."""

    maps: Tensor
    vectors: Tensor
    gradients: Tensor


def slot_table(shape: HostShape, number: int, device: torch.device) -> SlotTable:
    """The table of slot `number`."""
    channels = shape.slots[number].channels
    programs = program.programs(shape.blueprints, channels)
    hidden = GATE.hidden.of(channels)
    widest = max(channels, hidden, program.widest(programs))
    return SlotTable(
        number,
        len(shape.slots),
        channels,
        programs=torch.from_numpy(programs).to(device),
        maps=1 + program.largest(programs, "map"),
        lanes=lanes_of(widest),
        units=lanes_of(max(hidden, program.largest(programs, "hidden"))),
        stride=-(-widest // 8) * 8,
        gate_at=row_layout(shape, number).seed,
        gate_hidden=hidden,
    )


def num_splits(batch: int) -> int:
    """Parts of the sums over a batch; depend on nothing else, so that no network's numbers do."""
    return min(MAX_SPLITS, triton.cdiv(batch, IMAGES_PER_SPLIT))


def slot_workspace(
    table: SlotTable, places: int, size: tuple[int, int], like: Tensor, gradients: bool
) -> SlotWorkspace:
    """Memory for `places` images of (height, width), like `like`; gradients: with room for them."""
    area = size[0] * size[1]
    stride = table.stride
    vectors = like.new_zeros(
        places, table.parts + 2, VECTORS.value, table.lanes, dtype=torch.float32
    )
    room = like.new_empty(places if gradients else 1, table.parts, area, stride)
    return SlotWorkspace(like.new_empty(places, table.maps, area, stride), vectors, room)


def slot_of(
    table: SlotTable,
    slot_flags: Tensor,
    alpha: Tensor,
    params: Tensor,
    work: SlotWorkspace,
    size: tuple[int, int],
    pooled: bool,
) -> KernelSlot:
    """The record that the kernels read.

    slot_flags: int32 [N, S], see slot_flags.py; alpha: float32 [N, S]; params: [N, width].
    """
    lanes = table.lanes
    chosen = slot_tile(lanes, work.maps.dtype)
    area = size[0] * size[1]
    tile = min(chosen.pixels, padded(area))
    sizes = constants(
        height=size[0],
        width=size[1],
        channels=table.channels,
        stride=work.maps.shape[3],
        lanes=lanes,
        units=table.units,
        tile=tile,
        columns=chosen.columns,
        taps=max(1, chosen.columns // lanes),
        group=chosen.group,
        group_taps=max(1, chosen.group // lanes),
        whole=area % tile == 0,
        parts=table.parts,
        maps=table.maps,
        gate_at=table.gate_at,
        gate_hidden=table.gate_hidden,
        pool=2 if pooled else 1,
        **product_precision(work.maps.dtype),
    )
    return KernelSlot(
        slot_flags,
        alpha,
        **constants(number=table.number, num_slots=table.num_slots),
        programs=table.programs,
        rows=rows(params),
        **work._asdict(),
        area=area,
        shape=SlotShape(**sizes),
    )


def forward_(slot: KernelSlot, features: Tensor, pooled: Tensor, codes: Tensor) -> None:
    """features [N, B, H*W, C] through the slot, in place; its pool's to pooled, codes."""
    slot_forward_kernel[features.shape[:2]](slot, features, pooled, codes, **_options(slot))


def backward_(slot: KernelSlot, gradient: Tensor, pooled: Tensor, codes: Tensor) -> None:
    """gradient of the features behind the slot to that before it, in place, for `weights_`.

    pooled: gradient of the pooled features, where the slot has a pool.
    """
    slot_backward_kernel[gradient.shape[:2]](
        slot, gradient, pooled, codes, **_options(slot, backward=True)
    )


def weights_(slots: tuple[KernelSlot, ...], partials: tuple[Tensor, ...], batch: int) -> None:
    """Gradients of parameters in all slots after backward passes of `batch` images per network.

    partials: by slot [N, num_splits, width]; only columns of seeds that learn are written.
    """
    num_nets, splits = partials[0].shape[:2]
    parts = max(slot.shape.parts.value for slot in slots)
    options = _options(*slots, backward=True) | {"num_slots": len(slots)}
    share = Share(batch, triton.cdiv(batch, splits), tl.constexpr(parts))
    seed_weights_kernel[num_nets, splits, len(slots) * (parts + 1)](
        slots, tuple(map(rows, partials)), share, **options
    )


def num_programs(device: torch.device) -> int:
    """Programs of `branch_`: a few per multiprocessor, so that their work places stay in L2."""
    if device.type != "cuda":
        return 2
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def branch_(
    slot: KernelSlot,
    source: Tensor,
    target: Tensor,
    spare: Tensor,
    tree: tuple[int, int, Tensor, Tensor],
) -> None:
    """target [n * rows, B, ., C] = features behind a slot in validation; see slot_branch_kernel."""
    units, batch = target.shape[:2]
    slot_branch_kernel[spare.shape[0],](
        slot, source, target, spare, tree, batch, units * batch, **_options(slot)
    )


def _options(*slots: KernelSlot, backward: bool = False) -> dict[str, int | str]:
    """Options of a launch; with a single stage loads stay behind the barriers of their stores."""
    few = all(_takes_few_registers(slot, backward) for slot in slots)
    limit = FEW_REGISTERS if few else MAX_REGISTERS
    return {"num_stages": 1, "maxnreg": limit, "ptx_options": NO_EAGER_LOADS}


def _takes_few_registers(slot: KernelSlot, backward: bool) -> bool:
    """The assembler unrolls loops over a map of known size, in backward passes with many loads."""
    size = slot.maps.dtype.itemsize
    lanes = slot.shape.lanes.value
    numbers = slot.shape.height.value * slot.shape.width.value * lanes
    is_small = size == 2 and numbers <= SMALL_MAP
    return lanes * size <= SMALL_PIXEL and (is_small or not backward)
