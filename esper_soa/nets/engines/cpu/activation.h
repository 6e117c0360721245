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

/* e to the x for x up to 88, 1e-38 below -87; after Cephes (Moshier). NaN stays NaN. */
INLINE vec exponential(vec x) {
    x = choose(x < splat(-87.0f), splat(-87.0f), x);
    vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds, and leaves the integer in the last bits */
    vec moved = x * splat(1.44269504088896341f) + magic, n = moved - magic;
    vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec y = splat(1.9875691500e-4f);
    y = y * r + splat(1.3981999507e-3f);
    y = y * r + splat(8.3334519073e-3f);
    y = y * r + splat(4.1665795894e-2f);
    y = y * r + splat(1.6666665459e-1f);
    y = y * r + splat(5.0000001201e-1f);
    y = y * r * r + r + splat(1.0f);
    return y * (vec)(((ints)moved << 23) + 0x3f800000);
}

/* Share of the normal distribution below x, and its density there; Abramowitz and Stegun 7.1.26, to 1e-7. */
INLINE vec normal_share(vec x, vec *density) {
    vec u = choose(x < splat(0), -x, x) * splat(0.70710678118654752f);
    vec t = splat(1) / (splat(1) + splat(0.3275911f) * u);
    vec e = exponential(-u * u);
    vec tail = splat(1.061405429f);
    tail = tail * t + splat(-1.453152027f);
    tail = tail * t + splat(1.421413741f);
    tail = tail * t + splat(-0.284496736f);
    tail = tail * t + splat(0.254829592f);
    tail = tail * t * e * splat(0.5f);
    *density = e * splat(0.39894228040143268f);
    return choose(x < splat(0), tail, splat(1) - tail);
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

INLINE vec clamp(vec x, float low, float high) {
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
}

INLINE vec activated(int kind, vec x) {
    vec density;
    switch (kind) {
    case RECTIFY: return relu(x);
    case SILU: return x * sigmoid(x);
    case SIGMOID: return sigmoid(x);
    case TANH: return hyperbolic_tangent(x);
    case GELU: return x * normal_share(x, &density);
    case HARDSWISH: return x * clamp(x + splat(3), 0, 6) / splat(6);
    case HARDSIGMOID: return clamp(x + splat(3), 0, 6) / splat(6);
    case RELU6: return clamp(x, 0, 6);
    default: return x;
    }
}

/* The gradient of x from that of what became of it. */
INLINE vec activated_back(int kind, vec x, vec grad) {
    vec s, density;
    switch (kind) {
    case RECTIFY: return keep(~(x <= splat(0)), grad);
    case SILU: s = sigmoid(x); return grad * s * (splat(1) + x * (splat(1) - s));
    case SIGMOID: s = sigmoid(x); return grad * s * (splat(1) - s);
    case TANH: s = hyperbolic_tangent(x); return grad * (splat(1) - s * s);
    case GELU: s = normal_share(x, &density); return grad * (s + x * density);
    case HARDSWISH:
        s = choose(x > splat(3), grad, grad * (x / splat(3) + splat(0.5f)));
        return keep(~(x < splat(-3)), s);
    case HARDSIGMOID: return keep((x > splat(-3)) & (x < splat(3)), grad / splat(6));
    case RELU6: return keep((x > splat(0)) & (x < splat(6)), grad);
    default: return grad;
    }
}

#endif
