"""Two small layers on an image's mean, sigmoid(W2 relu(W1 m + b1) + b2): of attention and gates.

A `net` is (parameter row, first column, inputs, hidden units, outputs, whether there is a b1).
What belongs to channels is a vector [lanes], what belongs to hidden units one [units], with zeros
beyond what there is.
"""

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels import seed


@triton.jit
def part_net(row, part):
    """The net of an EXCITE part."""
    biased = (tl.load(part + seed.FLAGS) & seed.BIASED) // seed.BIASED
    inputs = tl.load(part + seed.INPUTS)
    outputs = tl.load(part + seed.OUTPUTS)
    return row, tl.load(part + seed.OFFSET), inputs, tl.load(part + seed.HIDDEN), outputs, biased


@triton.jit
def gate_net(row, shape):
    """The net that GATE adds to a seed, with one output."""
    return row, shape.gate_at, shape.channels, shape.gate_hidden, 1, 1


@triton.jit
def matrix_places(first, rows, columns, height: tl.constexpr, width: tl.constexpr):
    """([height, width] places of [rows, columns] that begin at `first`, which there are)."""
    row = tl.arange(0, height)[:, None]
    column = tl.arange(0, width)[None, :]
    return first + row * columns + column, (row < rows) & (column < columns)


@triton.jit
def first_layer(net, shape):
    """float32 [units, lanes]: W1."""
    place, known = matrix_places(net[1], net[3], net[2], shape.units, shape.lanes)
    return tl.load(net[0] + place, mask=known, other=0.0)


@triton.jit
def second_layer(net, shape):
    """float32 [lanes, units]: W2."""
    place, known = matrix_places(second_at(net), net[4], net[3], shape.lanes, shape.units)
    return tl.load(net[0] + place, mask=known, other=0.0)


@triton.jit
def second_at(net):
    """Column at which the second layer begins."""
    return net[1] + net[3] * net[2] + net[3] * net[5]


@triton.jit
def squeeze_forward(net, mean, shape):
    """(hidden units, outputs in (0, 1))."""
    bias = net[1] + net[3] * net[2]
    units = tl.sum(first_layer(net, shape) * mean[None, :], axis=1)
    units += seed.parameters_at(net[0], bias, net[3] * net[5], shape.units)
    units = tl.where(units < 0, 0.0, units)
    bias = second_at(net) + net[4] * net[3]
    logits = tl.sum(second_layer(net, shape) * units[None, :], axis=1)
    logits += seed.parameters_at(net[0], bias, net[4], shape.lanes)
    return units, tl.where(tl.arange(0, shape.lanes) < net[4], tl.sigmoid(logits), 0.0)


@triton.jit
def squeeze_backward(net, vectors, gradient, outputs, shape):
    """Gradient of the mean from that of the outputs; what the weights' needs goes to `vectors`."""
    logit = gradient * outputs * (1.0 - outputs)
    units = saved_units(vectors, seed.UNITS, shape)
    hidden_gradient = tl.sum(second_layer(net, shape) * logit[:, None], axis=0)
    hidden_gradient = tl.where(units <= 0, 0.0, hidden_gradient)
    seed.save_vector(vectors, seed.LOGIT, logit, shape)
    seed.save_vector(vectors, seed.UNIT_GRADIENT, hidden_gradient, shape)
    return tl.sum(first_layer(net, shape) * hidden_gradient[:, None], axis=0)


@triton.jit
def saved_units(vectors, which: tl.constexpr, shape):
    """float32 [units]: see seed.saved_vector."""
    return tl.load(vectors + which * shape.lanes + tl.arange(0, shape.units))


@triton.jit
def store_matrix(target, first, values, rows, columns):
    """values [M, K] to [rows, columns] from `first` on."""
    place, known = matrix_places(first, rows, columns, values.shape[0], values.shape[1])
    tl.store(target + place, values, mask=known)


@triton.jit
def store_row(target, first, values, count):
    """The first `count` of values [K] to columns from `first` on."""
    lane = tl.arange(0, values.shape[0])
    tl.store(target + first + lane, values, mask=lane < count)


@triton.jit
def squeeze_weights(net, target, vectors, images, shape):
    """Gradients of a net's parameters, summed over images (first, last), to their columns of the
    row `target`; vectors: pointer to the net's vectors of image 0 of the network.
    """
    first_sum = tl.zeros((shape.units, shape.lanes), tl.float32)
    second_sum = tl.zeros((shape.lanes, shape.units), tl.float32)
    units_sum = tl.zeros((shape.units,), tl.float32)
    logit_sum = tl.zeros((shape.lanes,), tl.float32)
    for image in range(images[0], images[1]):
        pointer = seed.of_image(vectors, image, shape)
        unit_gradient = saved_units(pointer, seed.UNIT_GRADIENT, shape)
        logit = seed.saved_vector(pointer, seed.LOGIT, shape)
        first_sum += unit_gradient[:, None] * seed.saved_vector(pointer, seed.MEAN, shape)[None, :]
        second_sum += logit[:, None] * saved_units(pointer, seed.UNITS, shape)[None, :]
        units_sum += unit_gradient
        logit_sum += logit
    second = second_at(net)
    store_matrix(target, net[1], first_sum, net[3], net[2])
    store_row(target, net[1] + net[3] * net[2], units_sum, net[3] * net[5])
    store_matrix(target, second, second_sum, net[4], net[3])
    store_row(target, second + net[4] * net[3], logit_sum, net[4])
