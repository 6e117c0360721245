"""Two small layers on an image's mean, sigmoid(W2 relu(W1 m + b1) + b2): of attention and gates.

A `net` is (parameter row, first column, inputs, hidden units, outputs, whether there is a b1).
Every number is a vector [lanes] with zeros beyond what there is.
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
def matrix(row, first, rows, columns, shape):
    """float32 [lanes, lanes] of a row: [rows, columns] from `first` on, then zeros."""
    one = tl.arange(0, shape.lanes)[:, None]
    other = tl.arange(0, shape.lanes)[None, :]
    return tl.load(
        row + first + one * columns + other, mask=(one < rows) & (other < columns), other=0.0
    )


@triton.jit
def second_at(net):
    """Column at which the second layer begins."""
    return net[1] + net[3] * net[2] + net[3] * net[5]


@triton.jit
def squeeze_forward(net, mean, shape):
    """(hidden units, outputs in (0, 1))."""
    units = tl.sum(matrix(net[0], net[1], net[3], net[2], shape) * mean[None, :], axis=1)
    units += seed.parameters_at(net[0], net[1] + net[3] * net[2], net[3] * net[5], shape)
    units = tl.where(units < 0, 0.0, units)
    second = second_at(net)
    logits = tl.sum(matrix(net[0], second, net[4], net[3], shape) * units[None, :], axis=1)
    logits += seed.parameters_at(net[0], second + net[4] * net[3], net[4], shape)
    return units, tl.where(tl.arange(0, shape.lanes) < net[4], tl.sigmoid(logits), 0.0)


@triton.jit
def squeeze_backward(net, vectors, gradient, outputs, shape):
    """Gradient of the mean from that of the outputs; what the weights' needs goes to `vectors`."""
    logit = gradient * outputs * (1.0 - outputs)
    units = seed.saved_vector(vectors, seed.UNITS, shape)
    hidden_gradient = tl.sum(
        matrix(net[0], second_at(net), net[4], net[3], shape) * logit[:, None], axis=0
    )
    hidden_gradient = tl.where(units <= 0, 0.0, hidden_gradient)
    seed.save_vector(vectors, seed.LOGIT, logit, shape)
    seed.save_vector(vectors, seed.UNIT_GRADIENT, hidden_gradient, shape)
    return tl.sum(matrix(net[0], net[1], net[3], net[2], shape) * hidden_gradient[:, None], axis=0)


@triton.jit
def store_matrix(target, first, values, rows, columns, shape):
    """values [lanes, lanes] to [rows, columns] from `first` on."""
    one = tl.arange(0, shape.lanes)[:, None]
    other = tl.arange(0, shape.lanes)[None, :]
    tl.store(target + first + one * columns + other, values, mask=(one < rows) & (other < columns))


@triton.jit
def store_row(target, first, values, count, shape):
    """The first `count` of values [lanes] to columns from `first` on."""
    lane = tl.arange(0, shape.lanes)
    tl.store(target + first + lane, values, mask=lane < count)


@triton.jit
def squeeze_weights(net, target, vectors, images, shape):
    """Gradients of a net's parameters, summed over images (first, last), to their columns of the
    row `target`; vectors: pointer to the net's vectors of image 0 of the network.
    """
    one = tl.zeros((shape.lanes, shape.lanes), tl.float32)
    two = tl.zeros((shape.lanes, shape.lanes), tl.float32)
    units_sum = tl.zeros((shape.lanes,), tl.float32)
    logit_sum = tl.zeros((shape.lanes,), tl.float32)
    for image in range(images[0], images[1]):
        pointer = seed.of_image(vectors, image, shape)
        unit_gradient = seed.saved_vector(pointer, seed.UNIT_GRADIENT, shape)
        logit = seed.saved_vector(pointer, seed.LOGIT, shape)
        one += unit_gradient[:, None] * seed.saved_vector(pointer, seed.MEAN, shape)[None, :]
        two += logit[:, None] * seed.saved_vector(pointer, seed.UNITS, shape)[None, :]
        units_sum += unit_gradient
        logit_sum += logit
    second = second_at(net)
    store_matrix(target, net[1], one, net[3], net[2], shape)
    store_row(target, net[1] + net[3] * net[2], units_sum, net[3] * net[5], shape)
    store_matrix(target, second, two, net[4], net[3], shape)
    store_row(target, second + net[4] * net[3], logit_sum, net[4], shape)
