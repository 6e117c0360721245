/* Hosts and seeds joined, forward and backward; see join.h. */
#include "join.h"

/* tanh of |x| below 0.625 by a polynomial, else from the exponential: S. Moshier's Cephes library, tanhf and expf. */
INLINE vec small_tanh(vec x) {
    vec square = x * x, sum = splat(-5.70498872745e-3f);
    sum = sum * square + splat(2.06390887954e-2f);
    sum = sum * square - splat(5.37397155531e-2f);
    sum = sum * square + splat(1.33314422036e-1f);
    sum = sum * square - splat(3.33332819422e-1f);
    return x + x * square * sum;
}

/* e to the power of x in [0, 20]. */
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
    vec size = (vec)((ints)x & 0x7fffffff), most = splat(9);
    vec held = choose(size > most, most, size);
    held = choose(held == held, held, most);
    vec large = splat(1) - splat(2) / (exponential(held + held) + splat(1));
    vec value = choose(size < splat(0.625f), small_tanh(x), (vec)((ints)large | ((ints)x & (int)0x80000000)));
    return choose(x == x, value, x);
}

/* The share of image b's residual that is added. */
INLINE float share_of(const joint *j, long b) { return j->flags & GATED ? j->alpha * *squeeze_out(&j->gate, b) : j->alpha; }

/* 8 numbers of the residual at i. */
INLINE vec residual_at(const joint *j, long i) {
    vec r = load(j->residual + i);
    return j->flags & REPLACED ? r - load(j->host + i) : r;
}

void join_forward(const joint *j) {
    long numbers = j->pixels * j->channels;
    for (long b = 0; b < j->batch; b++) {
        long at = b * numbers;
        const float *x = j->host;
        if (j->flags & GATED) squeeze_image(&j->gate, x + at, j->pixels, b);
        vec share = splat(share_of(j, b));
        if (j->flags & MULTIPLIED)
            for (long i = at; i < at + numbers; i += LANES)
                store(j->out + i, load(x + i) * (splat(1) + share * hyperbolic_tangent(residual_at(j, i))));
        else
            for (long i = at; i < at + numbers; i += LANES) store(j->out + i, load(x + i) + share * residual_at(j, i));
    }
}

/* The residual of a seed that replaces x falls as x rises, unless that x is cut off. */
static void multiplied_back(const joint *j, long b) {
    long numbers = j->pixels * j->channels, at = b * numbers;
    int falling = j->flags & REPLACED && !(j->flags & DETACHED);
    vec share = splat(j->alpha);
    for (long i = at; i < at + numbers; i += LANES) {
        vec grad = load(j->grad_out + i), tangent = hyperbolic_tangent(residual_at(j, i));
        vec inner = share * load(j->host + i) * (splat(1) - tangent * tangent) * grad;
        vec outer = (splat(1) + share * tangent) * grad;
        store(j->grad_residual + i, inner);
        store(j->grad_host + i, falling ? outer - inner : outer);
    }
}

/* x + share r: where the seed is cut off or replaces x, (1 - share) of the gradient reaches x; where it is cut off, none
 * through a gate. */
static void added_back(const joint *j, long b, float *grad_mean) {
    long numbers = j->pixels * j->channels, at = b * numbers;
    int cut = j->flags & DETACHED;
    float share = share_of(j, b);
    vec gate[2] = {splat(0), splat(0)}, kept = splat(cut || j->flags & REPLACED ? 1.0f - share : 1.0f);
    for (long i = at; i < at + numbers; i += LANES) {
        vec grad = load(j->grad_out + i);
        gate[i / LANES & 1] += grad * residual_at(j, i);
        store(j->grad_residual + i, splat(share) * grad);
        store(j->grad_host + i, kept * grad);
    }
    if (!(j->flags & GATED)) return;
    vec both = gate[0] + gate[1];
    float sum = j->alpha * (((both[0] + both[1]) + (both[2] + both[3])) + ((both[4] + both[5]) + (both[6] + both[7])));
    squeeze_image_back(&j->gate, &sum, grad_mean, b);
    for (long p = 0; p < j->pixels && !cut; p++)
        for (long c = 0; c < j->channels; c += LANES) {
            float *to = j->grad_host + at + p * j->channels + c;
            store(to, load(to) + load(grad_mean + c) / splat((float)j->pixels));
        }
}

/* Behind a host that went on with x, the seed and x both get the gradient, and x the seed's own x in x + r again. */
static void through_back(const joint *j, long b) {
    long numbers = j->pixels * j->channels, at = b * numbers;
    vec share = splat(j->flags & (DETACHED | REPLACED) ? 1.0f : 2.0f);
    for (long i = at; i < at + numbers; i += LANES) {
        vec grad = load(j->grad_out + i);
        store(j->grad_residual + i, grad);
        store(j->grad_host + i, share * grad);
    }
}

int join_backward(const joint *j) {
    float *grad_mean = scratch(j->channels);
    for (long b = 0; b < j->batch && grad_mean; b++)
        if (j->flags & THROUGH) through_back(j, b);
        else if (j->flags & MULTIPLIED) multiplied_back(j, b);
        else added_back(j, b, grad_mean);
    free(grad_mean);
    return !grad_mean;
}
