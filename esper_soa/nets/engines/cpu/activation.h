/* Activations and their derivatives, by vectors; those of torch. */
#ifndef ESPER_ACTIVATION_H
#define ESPER_ACTIVATION_H

#include "vec.h"

enum { RECTIFY, IDENTITY, SILU, SIGMOID, TANH, GELU, HARDSWISH, HARDSIGMOID, RELU6 };

/* tanh of |x| below 0.625 by a polynomial, else from the exponential: S. Moshier's Cephes library, tanhf and expf. */
INLINE vec small_tanh(vec x) {
    vec square = x * x, sum = splat(-5.70498872745e-3f);
    sum = sum * square + splat(2.06390887954e-2f);
    sum = sum * square - splat(5.37397155531e-2f);
    sum = sum * square + splat(1.33314422036e-1f);
    sum = sum * square - splat(3.33332819422e-1f);
    return x + x * square * sum;
}

/* e to the power of x in [0, 88]. */
INLINE vec exponential(vec x) {
    ints power = __builtin_convertvector(x * splat(1.44269504088896341f) + splat(0.5f), ints);
    vec whole = __builtin_convertvector(power, vec);
    vec rest = x - whole * splat(0.693359375f) - whole * splat(-2.12194440e-4f), sum = splat(1.9875691500e-4f);
    sum = sum * rest + splat(1.3981999507e-3f);
    sum = sum * rest + splat(8.3334519073e-3f);
    sum = sum * rest + splat(4.1665795894e-2f);
    sum = sum * rest + splat(1.6666665459e-1f);
    sum = sum * rest + splat(5.0000001201e-1f);
    sum = sum * rest * rest + rest + splat(1);
    return sum * (vec)((power + 127) << 23);
}

/* Where it is 1 to the last digit, x is taken as 9; a NaN stays one. */
INLINE vec hyperbolic_tangent(vec x) {
    vec size = (vec)((ints)x & 0x7fffffff), largest = splat(9);
    vec held = choose(size > largest, largest, size);
    held = choose(held == held, held, largest);
    vec large = splat(1) - splat(2) / (exponential(held + held) + splat(1));
    vec value = choose(size < splat(0.625f), small_tanh(x), (vec)((ints)large | ((ints)x & (int)0x80000000)));
    return choose(x == x, value, x);
}

/* What is near 87 or beyond is taken as that, where a sigmoid is 0 or 1; a NaN stays one. */
INLINE vec sigmoid(vec x) {
    vec size = (vec)((ints)x & 0x7fffffff), small = splat(1) / (splat(1) + exponential(choose(size > splat(87), splat(87), size)));
    return choose(x < splat(0), small, splat(1) - small);
}

/* The integral of the normal density up to x: W. J. Cody's bound 1e-7 by M. Abramowitz and I. Stegun, 7.1.26. */
INLINE vec normal_integral(vec x) {
    vec size = (vec)((ints)x & 0x7fffffff) * splat(0.70710678118654752f), t = splat(1) / (splat(1) + splat(0.3275911f) * size);
    vec square = choose(size > splat(9), splat(81), size * size), sum = splat(1.061405429f);
    sum = sum * t - splat(1.453152027f);
    sum = sum * t + splat(1.421413741f);
    sum = sum * t - splat(0.284496736f);
    sum = sum * t + splat(0.254829592f);
    vec tail = splat(0.5f) * sum * t / exponential(square);
    return choose(x < splat(0), tail, splat(1) - tail);
}

INLINE vec clamp(vec x, float low, float high) {
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
}

INLINE vec activated(int kind, vec x) {
    switch (kind) {
    case RECTIFY: return relu(x);
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    case TANH: return hyperbolic_tangent(x);
    case GELU: return x * normal_integral(x);
    case HARDSWISH: return x * clamp(x + splat(3), 0, 6) / splat(6);
    case HARDSIGMOID: return clamp(x + splat(3), 0, 6) / splat(6);
    case RELU6: return clamp(x, 0, 6);
    default: return x;
    }
}

/* The gradient of x from that of what became of it. */
INLINE vec activated_back(int kind, vec x, vec grad) {
    vec s;
    switch (kind) {
    case RECTIFY: return keep(~(x <= splat(0)), grad);
    case SILU: s = sigmoid(x); return grad * s * (splat(1) + x * (splat(1) - s));
    case SIGMOID: s = sigmoid(x); return grad * s * (splat(1) - s);
    case TANH: s = hyperbolic_tangent(x); return grad * (splat(1) - s * s);
    case GELU:
        s = choose(x * x > splat(160), splat(160), x * x);
        return grad * (normal_integral(x) + x * splat(0.398942280401432678f) / exponential(splat(0.5f) * s));
    case HARDSWISH:
        s = choose(x > splat(3), grad, grad * (x / splat(3) + splat(0.5f)));
        return keep(~(x < splat(-3)), s);
    case HARDSIGMOID: return keep((x > splat(-3)) & (x < splat(3)), grad / splat(6));
    case RELU6: return keep((x > splat(0)) & (x < splat(6)), grad);
    default: return grad;
    }
}

#endif
