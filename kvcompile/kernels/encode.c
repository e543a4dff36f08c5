/* Error-feedback rounding on a CPU: the codes of kvcompile/codec/feedback.py, bit for bit.

   Compiled at run time by kernels/cpu_encode.py, without -ffast-math and without contraction to multiply-adds: every
   float operation that rounds does so once, as in torch. One token per lane: the channels of a token depend on each
   other, tokens do not. Sums of errors times factor are exact (feedback.py says why), so their order is free. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
#if defined(__AVX512F__)
    LANES = 16,
#elif defined(__AVX__)
    LANES = 8,
#else
    LANES = 4,
#endif
    VECTORS = 4, /* in flight, for each of the channels of a block */
    TOKENS = LANES * VECTORS,
    BLOCK = 4, /* channels that share the sum over all channels before them */
    ERROR_LIMIT = 511,
};

#define UNROLL _Pragma("GCC unroll 4")

typedef float Floats __attribute__((vector_size(4 * LANES)));

/* Codes [count][D] of up to TOKENS tokens, the first of which is number t0 of the block that scale and zero are of. */
static void code_tokens(const float *x, const float *scale, const float *zero, const float *factor, uint8_t *codes,
                        int t0, int count, int D, int group_tokens, int group_channels, float levels) {
    const int columns = D / group_channels;
    int row[TOKENS]; /* where a token's scales begin */
    Floats error[D][VECTORS];
    float delta[TOKENS] = {0}, per_delta[TOKENS] = {0}; /* powers of two: products are exact */
    for (int t = 0; t < count; t++) {
        row[t] = (t0 + t) / group_tokens * columns;
        int32_t top = 0; /* positive floats are in the order of their bits */
        for (int i = 0; i < columns; i++) {
            int32_t bits;
            memcpy(&bits, &scale[row[t] + i], 4);
            top = bits > top ? bits : top;
        }
        float largest;
        int exponent;
        memcpy(&largest, &top, 4);
        frexpf(largest, &exponent);
        delta[t] = ldexpf(1, exponent - 7);
        per_delta[t] = ldexpf(1, 7 - exponent);
    }
    for (int start = 0; start < D; start += BLOCK) {
        Floats sum[BLOCK][VECTORS] = {0};
        for (int j = 0; j < start; j++)
            UNROLL for (int c = 0; c < BLOCK; c++)
                UNROLL for (int v = 0; v < VECTORS; v++) sum[c][v] += error[j][v] * factor[(size_t)j * D + start + c];
        float fed[BLOCK][TOKENS];
        memcpy(fed, sum, sizeof fed);
        for (int c = 0; c < BLOCK; c++) {
            const int d = start + c, column = d / group_channels;
            float exact[TOKENS] = {0}, s[TOKENS], z[TOKENS], code[TOKENS], left[TOKENS];
            for (int t = 0; t < TOKENS; t++) s[t] = 1, z[t] = 0;
            for (int t = 0; t < count; t++) {
                exact[t] = x[(size_t)t * D + d];
                s[t] = scale[row[t] + column];
                z[t] = zero[row[t] + column];
            }
            for (int t = 0; t < TOKENS; t++) {
                float wanted = (exact[t] - fed[c][t] * delta[t]) / s[t] + z[t];
                wanted = wanted < 0 ? 0 : wanted;
                wanted = wanted > levels ? levels : wanted;
                code[t] = rintf(wanted);
                float off = ((code[t] - z[t]) * s[t] - exact[t]) * per_delta[t];
                off = off < -ERROR_LIMIT ? -ERROR_LIMIT : off;
                off = off > ERROR_LIMIT ? ERROR_LIMIT : off;
                left[t] = rintf(off);
            }
            memcpy(error[d], left, sizeof left);
            for (int later = c + 1; later < BLOCK; later++)
                for (int t = 0; t < TOKENS; t++) fed[later][t] += left[t] * factor[(size_t)d * D + start + later];
            for (int t = 0; t < count; t++) codes[(size_t)t * D + d] = (uint8_t)code[t];
        }
    }
}

/* x and codes [blocks][T][D], factor [K][D][D]; scale and zero [blocks][T / group_tokens][D / group_channels]. */
void feedback_codes(const float *x, const float *scale, const float *zero, const float *factor, uint8_t *codes,
                    int blocks, int K, int T, int D, int group_tokens, int group_channels, int bits, int threads) {
    const int parts = (T + TOKENS - 1) / TOKENS, cells = T / group_tokens * (D / group_channels);
#pragma omp parallel for num_threads(threads) if (blocks * parts > 1)
    for (int task = 0; task < blocks * parts; task++) {
        const int block = task / parts, t = task % parts * TOKENS, count = T - t < TOKENS ? T - t : TOKENS;
        const size_t first = ((size_t)block * T + t) * D, cell = (size_t)block * cells;
        code_tokens(x + first, scale + cell, zero + cell, factor + (size_t)(block % K) * D * D, codes + first, t, count,
                    D, group_tokens, group_channels, (1 << bits) - 1);
    }
}
