/* Decode attention on a CPU over one layer of a packed cache: the layout of kvcompile/codec/{page,layer}.py, float32 maths.

   Compiled at run time by kernels/cpu.py, once per geometry, with -D of HEAD_DIM, KEY_BITS, VALUE_BITS, KEY_GROUP,
   VALUE_GROUP and QUERIES (query heads per KV head). No intrinsics: GCC vector extensions, one token per lane.

   1. A page's codes always lie along lanes of *tokens*: value codes are stored so, key codes are transposed as 32-bit words.
      A code is taken out by one mask and one int-to-float conversion and never shifted: the code at bit p reads as
      code * 2^p, and 2^-p is folded into the query (keys) or into the result (values). So there is no horizontal sum.
   2. Scale s and zero z stay outside: logit = s * (q.code) - s z sum(q), out = sum (p s) code - sum p s z, per group.
   3. Online softmax in base 2 over blocks of pages. The history is cut into tasks (row, KV head, split); partial results
      are merged in order, so the result depends on the number of threads but not on who did what. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    PAGE = 64,         /* tokens of a page */
    BLOCK_PAGES = 8,   /* pages per step of the online softmax */
    BLOCK = PAGE * BLOCK_PAGES,
    TASKS_PER_THREAD = 4,
    D = HEAD_DIM,
    G = QUERIES,
    KEY_GROUPS = D / KEY_GROUP,
    VALUE_GROUPS = D / VALUE_GROUP,
    KEY_CODES = 8 / KEY_BITS,      /* codes of a byte; code i of byte j is channel j + i KEY_ROW */
    VALUE_CODES = 8 / VALUE_BITS,
    KEY_ROW = D / KEY_CODES,       /* bytes of a token */
    VALUE_ROW = D / VALUE_CODES,
    VALUE_OFFSET = PAGE * KEY_ROW,
    KEY_META = VALUE_OFFSET + PAGE * VALUE_ROW,
    VALUE_META = KEY_META + PAGE * 4 * KEY_GROUPS,
    PAGE_BYTES = VALUE_META + PAGE * 4 * VALUE_GROUPS,
#if defined(__AVX512F__)
    LANES = 16, QUERY_BLOCK = 4,   /* 16 accumulators of 32 registers */
#elif defined(__AVX__)
    LANES = 8, QUERY_BLOCK = 2,    /* 8 of 16 */
#else
    LANES = 4, QUERY_BLOCK = 4,
#endif
    TILE = 4, /* vectors of tokens in flight */
    QUERY_REST = G % QUERY_BLOCK,
};

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef struct { /* running softmax of one task */
    float max[G], sum[G], out[G][D];
} Partial;

typedef struct { /* what a thread works in */
    Floats acc[G][D];                     /* packed values, lanes not yet summed, code i scaled by 2^(i VALUE_BITS) */
    float zero[G][VALUE_GROUPS];          /* sum of p s z */
    float q[G][D], q_code[G][D], q_sum[G][KEY_GROUPS];
    float logit[G][BLOCK], weight[VALUE_GROUPS][G][BLOCK];
    int32_t words[KEY_ROW / 4][PAGE];     /* key codes of a page, transposed */
} Scratch;

static _Thread_local Scratch scratch;

INLINE float bf16(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
INLINE Ints load(const int32_t *p) { Ints x; memcpy(&x, p, sizeof x); return x; }
INLINE Ints load_bytes(const uint8_t *p) { Bytes x; memcpy(&x, p, sizeof x); return __builtin_convertvector(x, Ints); }
INLINE Floats load_floats(const float *p) { Floats x; memcpy(&x, p, sizeof x); return x; }
INLINE Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }

INLINE float exp2_negative(float x) { /* 2^x for x <= 0, relative error 2e-7; plain arithmetic, so that loops vectorise */
    x = x < -126.0f ? -126.0f : x;
    int32_t n = (int32_t)(x - 0.5f), bits;
    float f = x - (float)n, p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    memcpy(&bits, &p, 4);
    bits += n * (1 << 23);
    memcpy(&p, &bits, 4);
    return p;
}

/* Logits [num_queries][PAGE] (row stride BLOCK) of the page whose transposed key codes are in scratch.words. */
INLINE void score_page(const int32_t *meta, int first_query, const int num_queries, float *logit) {
    for (int t = 0; t < PAGE; t += TILE * LANES) {
        Floats sum[QUERY_BLOCK][TILE] = {0};
        for (int group = 0; group < KEY_GROUPS; group++) {
            Floats dot[QUERY_BLOCK][TILE] = {0};
            UNROLL for (int i = 0; i < KEY_CODES; i++) {
                int low = group * KEY_GROUP > i * KEY_ROW ? group * KEY_GROUP : i * KEY_ROW;
                int high = (group + 1) * KEY_GROUP < (i + 1) * KEY_ROW ? (group + 1) * KEY_GROUP : (i + 1) * KEY_ROW;
                for (int d = low; d < high; d += 4) { /* channels d .. d + 3 of all tokens are in one word */
                    const int32_t *word = &scratch.words[(d - i * KEY_ROW) / 4][t];
                    UNROLL for (int b = 0; b < 4; b++) {
                        UNROLL for (int v = 0; v < TILE; v++) { /* the top byte holds the sign, so it moves down first */
                            Ints w = b < 3 ? load(word + v * LANES) : load(word + v * LANES) >> 8;
                            Floats code = to_float(w & (((1 << KEY_BITS) - 1) << ((b < 3 ? 8 * b : 16) + KEY_BITS * i)));
                            UNROLL for (int g = 0; g < num_queries; g++)
                                dot[g][v] += scratch.q_code[first_query + g][d + b] * code;
                        }
                    }
                }
            }
            UNROLL for (int v = 0; v < TILE; v++) {
                Ints pair = load(meta + group * PAGE + t + v * LANES);
                Floats scale = (Floats)(pair << 16), zero = (Floats)(pair & ~0xffff);
                UNROLL for (int g = 0; g < num_queries; g++)
                    sum[g][v] += scale * (dot[g][v] - zero * scratch.q_sum[first_query + g][group]);
            }
        }
        UNROLL for (int g = 0; g < num_queries; g++)
            UNROLL for (int v = 0; v < TILE; v++) memcpy(&logit[g * BLOCK + t + v * LANES], &sum[g][v], sizeof(Floats));
    }
}

/* acc = acc * rescale + weight @ value codes, over the pages of a block. */
INLINE void add_values(const uint8_t *const *page, int num_pages, const float *rescale, int first_query, const int num_queries) {
    for (int j = 0; j < VALUE_ROW; j++) {
        Floats sum[QUERY_BLOCK][VALUE_CODES] = {0};
        for (int n = 0; n < num_pages; n++) {
            const uint8_t *row = page[n] + VALUE_OFFSET + j * PAGE;
            UNROLL for (int t = 0; t < PAGE; t += LANES) {
                Ints bytes = load_bytes(row + t);
                UNROLL for (int i = 0; i < VALUE_CODES; i++) {
                    Floats code = to_float(bytes & (((1 << VALUE_BITS) - 1) << (VALUE_BITS * i)));
                    int group = (j + i * VALUE_ROW) / VALUE_GROUP;
                    UNROLL for (int g = 0; g < num_queries; g++)
                        sum[g][i] += load_floats(&scratch.weight[group][first_query + g][n * PAGE + t]) * code;
                }
            }
        }
        UNROLL for (int g = 0; g < num_queries; g++)
            UNROLL for (int i = 0; i < VALUE_CODES; i++) {
                Floats *acc = &scratch.acc[first_query + g][j + i * VALUE_ROW];
                *acc = *acc * rescale[g] + sum[g][i];
            }
    }
}

/* Logits of `count` tokens to softmax weights relative to the new maximum; returns what older results are multiplied by. */
static float softmax_step(float *logit, int count, float *max, float *sum) {
    float top = *max, total = 0;
    for (int t = 0; t < count; t++) top = logit[t] > top ? logit[t] : top;
    for (int t = 0; t < count; t++) total += logit[t] = exp2_negative(logit[t] - top);
    float rescale = exp2_negative(*max - top);
    *max = top;
    *sum = *sum * rescale + total;
    return rescale;
}

static void attend_pages(const uint8_t *const *page, int num_pages, Partial *part) {
    for (int n = 0; n < num_pages; n++) {
        if (n + 1 < num_pages) for (int x = 0; x < PAGE_BYTES; x += 64) __builtin_prefetch(page[n + 1] + x);
        for (int t = 0; t < PAGE; t++)
            for (int j = 0; j < KEY_ROW / 4; j++) memcpy(&scratch.words[j][t], page[n] + t * KEY_ROW + 4 * j, 4);
        const int32_t *meta = (const int32_t *)(page[n] + KEY_META);
        for (int g = 0; g + QUERY_BLOCK <= G; g += QUERY_BLOCK) score_page(meta, g, QUERY_BLOCK, &scratch.logit[g][n * PAGE]);
        if (QUERY_REST) score_page(meta, G - QUERY_REST, QUERY_REST, &scratch.logit[G - QUERY_REST][n * PAGE]);
    }
    float rescale[G];
    for (int g = 0; g < G; g++) {
        rescale[g] = softmax_step(scratch.logit[g], num_pages * PAGE, &part->max[g], &part->sum[g]);
        for (int d = 0; d < D; d++) part->out[g][d] *= rescale[g];
        for (int group = 0; group < VALUE_GROUPS; group++) {
            float zero_sum = 0;
            for (int n = 0; n < num_pages; n++) {
                const uint16_t *meta = (const uint16_t *)(page[n] + VALUE_META) + group * 2 * PAGE;
                for (int t = 0; t < PAGE; t++) {
                    float w = scratch.logit[g][n * PAGE + t] * bf16(meta[2 * t]);
                    scratch.weight[group][g][n * PAGE + t] = w;
                    zero_sum += w * bf16(meta[2 * t + 1]);
                }
            }
            scratch.zero[g][group] = scratch.zero[g][group] * rescale[g] + zero_sum;
        }
    }
    for (int g = 0; g + QUERY_BLOCK <= G; g += QUERY_BLOCK) add_values(page, num_pages, rescale + g, g, QUERY_BLOCK);
    if (QUERY_REST) add_values(page, num_pages, rescale + G - QUERY_REST, G - QUERY_REST, QUERY_REST);
}
