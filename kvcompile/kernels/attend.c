/* Decode attention on a CPU over a layer of a packed cache, in float32: the layout of kvcompile/codec/{page,layer}.py.

   Compiled at run time by kernels/cpu.py, once per format, with -D of HEAD_DIM, PAGE_TOKENS, QUERIES (query heads per
   KV head); KEY_BITS, KEY_GROUP, VALUE_BITS, VALUE_GROUP; KEYS_BY_CHANNEL and KEYS_SCALED (0 or 1: axis channel, norms);
   and where the parts of a page lie: VALUE_CODES_AT, KEY_META_AT, VALUE_META_AT, KEY_NORM_AT, PAGE_BYTES.
   No intrinsics: GCC vector extensions, one token per lane.

   1. Codes are read as 32-bit words with tokens along the lanes: value codes are stored so, key codes are transposed.
      A code is taken out by one mask and one int-to-float conversion and is not shifted: at bit p it reads as
      code * 2^p, and 2^-p is folded into the query (keys), the weight and the result (values). No horizontal sums.
   2. Four tokens share a word of value codes. So that weights line up with them, the weight of token 4 l + b of a page
      is put at position l of quarter b: lane l of byte b.
   3. Scale s and zero z of a token stay outside: logit = s (q.code) - s z sum(q), out = sum (p s) code - sum p s z, per
      group. Those of a channel go into the query, once per page and group of tokens: logit = (q s).code - (q s).z.
   4. Online softmax in base 2 over blocks of pages. The history is cut into tasks (row, KV head, split); partial
      results are merged in order, so the result depends on the number of threads but not on who did what. */

#ifndef __clang__
#pragma GCC optimize("no-tree-reassoc") /* or GCC splits chains of multiply-adds into multiplications and additions */
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE = PAGE_TOKENS,
    BLOCK = 512, /* tokens per step of the online softmax */
    BLOCK_PAGES = BLOCK / PAGE,
    TASKS_PER_THREAD = 4, /* enough to even out threads of unequal speed */
    D = HEAD_DIM,
    G = QUERIES,
    KEY_CODES = 8 / KEY_BITS, /* codes of a byte; code i of byte j is channel j + i KEY_ROW */
    VALUE_CODES = 8 / VALUE_BITS,
    KEY_ROW = D / KEY_CODES, /* bytes of a token */
    VALUE_ROW = D / VALUE_CODES,
    KEY_CHANNELS = KEYS_BY_CHANNEL ? D : KEY_GROUP,  /* whose products are summed before a scale is applied */
    KEY_TOKENS = KEYS_BY_CHANNEL ? KEY_GROUP : PAGE, /* for which the same folded query serves */
    KEY_GROUPS = D / KEY_CHANNELS,
    KEY_QUERIES = PAGE / KEY_TOKENS,
    VALUE_GROUPS = D / VALUE_GROUP,
#if defined(__AVX512F__)
    LANES = 16, QUERY_BLOCK = 4, /* 16 accumulators of 32 registers */
#elif defined(__AVX__)
    LANES = 8, QUERY_BLOCK = 2, /* 8 of 16 */
#else
    LANES = 4, QUERY_BLOCK = 4,
#endif
    TILE = 4, /* vectors of tokens in flight */
    TILES = PAGE / (TILE * LANES),
    FETCH = PAGE_BYTES * 4 / (TILES * D), /* bytes of the next page to fetch per four channels of a tile */
    QUERY_REST = G % QUERY_BLOCK,
};

#define LOWEST -1e30f /* stands for minus infinity, which -ffast-math does not know */
#define LOG2_E 1.44269504f
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

typedef struct { /* result of a task: the output before division by `sum` */
    float max[G], sum[G], out[G][D];
} Partial;

typedef struct { /* what a thread works in */
    Floats acc[G][D];             /* weights @ value codes; lanes not yet summed, code i still times 2^(i VALUE_BITS) */
    Floats zero[VALUE_GROUPS][G]; /* sum of p s z of a block, lanes not yet summed */
    float q[G][D], unit[D];          /* unit: 2^-p of each channel of the keys */
    float q_code[KEY_QUERIES][G][D]; /* what codes are multiplied by, as they are read */
    float q_sum[KEY_GROUPS][G];      /* sum(q) of a group of channels */
    float q_zero[KEY_QUERIES][G];    /* or (q s).z where keys are scaled by channel */
    float logit[G][BLOCK], weight[VALUE_GROUPS][G][BLOCK], scale[VALUE_GROUPS][BLOCK], scale_zero[VALUE_GROUPS][BLOCK];
    float norm[PAGE];
    int32_t key_word[KEY_ROW / 4][PAGE];
} Scratch;

INLINE float bits_to_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
INLINE float bf16(uint16_t x) { return bits_to_float((uint32_t)x << 16); }
INLINE Ints load(const void *p) { Ints x; memcpy(&x, p, sizeof x); return x; }
INLINE Floats load_floats(const float *p) { Floats x; memcpy(&x, p, sizeof x); return x; }

/* Code i of byte b of each word, times 2^code_shift(b, i); the top byte holds the sign, so it moves down first. */
INLINE int code_shift(int b, int i, int bits) { return 8 * (b < 3 ? b : 2) + bits * i; }
INLINE Floats code_of(Ints word, int b, int i, int bits) {
    return __builtin_convertvector((b < 3 ? word : word >> 8) & (((1 << bits) - 1) << code_shift(b, i, bits)), Floats);
}

/* 2^x for x <= 0, relative error 2e-7; plain arithmetic, so that loops over it vectorise. */
INLINE float exp2_negative(float x) {
    x = x < -126.0f ? -126.0f : x;
    const int32_t n = (int32_t)(x - 0.5f);
    const float f = x - (float)n;
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * bits_to_float((uint32_t)(n + 127) << 23);
}

/* Key codes of a page to words with tokens side by side. */
static void transpose_keys(Scratch *s, const int32_t *restrict from) {
    for (int t = 0; t < PAGE; t++)
        UNROLL for (int j = 0; j < KEY_ROW / 4; j++) s->key_word[j][t] = from[t * (KEY_ROW / 4) + j];
}

/* Scales and zero points of channels [KEY_QUERIES][D] into the queries. */
static void fold_queries(Scratch *s, const uint32_t *meta) {
    float scale[D], scale_zero[D];
    for (int n = 0; n < KEY_QUERIES; n++, meta += D) {
        for (int d = 0; d < D; d++) {
            scale[d] = bits_to_float(meta[d] << 16) * s->unit[d];
            scale_zero[d] = bits_to_float(meta[d] << 16) * bits_to_float(meta[d] & 0xffff0000u);
        }
        for (int g = 0; g < G; g++) {
            float total = 0;
            for (int d = 0; d < D; d++) {
                s->q_code[n][g][d] = s->q[g][d] * scale[d];
                total += s->q[g][d] * scale_zero[d];
            }
            s->q_zero[n][g] = total;
        }
    }
}

/* Logits of a page whose keys lie in scratch, for queries first .. first + count - 1; rows of `logit` BLOCK apart. */
INLINE void score_page(const Scratch *s, const uint8_t *page, int first, const int count, float *logit,
                       const uint8_t *next_page) {
    for (int t = 0; t < PAGE; t += TILE * LANES) {
        Floats sum[QUERY_BLOCK][TILE] = {0};
        for (int group = 0; group < KEY_GROUPS; group++) {
            const int start = group * KEY_CHANNELS, stop = start + KEY_CHANNELS;
            Floats dot[QUERY_BLOCK][TILE] = {0};
            UNROLL for (int i = 0; i < KEY_CODES; i++) { /* channels of the group that are code i of their byte */
                const int low = start > i * KEY_ROW ? start : i * KEY_ROW;
                const int high = stop < (i + 1) * KEY_ROW ? stop : (i + 1) * KEY_ROW;
                for (int d = low; d < high; d += 4) {
                    for (int x = 0; x < FETCH; x += 64) __builtin_prefetch(next_page + d / 4 * FETCH + x);
                    UNROLL for (int b = 0; b < 4; b++)
                        UNROLL for (int v = 0; v < TILE; v++) {
                            Ints word = load(&s->key_word[(d - i * KEY_ROW) / 4][t + v * LANES]);
                            Floats code = code_of(word, b, i, KEY_BITS);
                            const int n = (t + v * LANES) / KEY_TOKENS;
                            UNROLL for (int g = 0; g < count; g++) dot[g][v] += s->q_code[n][first + g][d + b] * code;
                        }
                }
            }
            UNROLL for (int v = 0; v < TILE; v++) {
                if (KEYS_BY_CHANNEL) {
                    const int n = (t + v * LANES) / KEY_TOKENS;
                    UNROLL for (int g = 0; g < count; g++) sum[g][v] = dot[g][v] - s->q_zero[n][first + g];
                } else {
                    Ints meta = load(page + KEY_META_AT + 4 * (group * PAGE + t + v * LANES));
                    Floats scale = (Floats)(meta << 16), zero = (Floats)(meta & ~0xffff);
                    UNROLL for (int g = 0; g < count; g++)
                        sum[g][v] += scale * (dot[g][v] - zero * s->q_sum[group][first + g]);
                }
            }
        }
        UNROLL for (int v = 0; v < TILE; v++)
            UNROLL for (int g = 0; g < count; g++) {
                if (KEYS_SCALED) sum[g][v] *= load_floats(&s->norm[t + v * LANES]);
                memcpy(&logit[g * BLOCK + t + v * LANES], &sum[g][v], sizeof(Floats));
            }
        next_page += FETCH * D / 4;
    }
}

/* acc = acc * rescale + weight @ values over the pages of a block, for queries first .. first + count - 1. */
INLINE void add_values(Scratch *s, const uint8_t *const *page, int num_pages, const float *rescale, int first,
                       const int count) {
    for (int j = 0; j < VALUE_ROW; j++) {
        Floats sum[QUERY_BLOCK][VALUE_CODES];
        UNROLL for (int g = 0; g < count; g++)
            UNROLL for (int i = 0; i < VALUE_CODES; i++) /* taken off first, as the two sums nearly cancel */
                sum[g][i] = s->zero[(j + i * VALUE_ROW) / VALUE_GROUP][first + g] * -(float)(1 << VALUE_BITS * i);
        for (int n = 0; n < num_pages; n++)
            for (int l = 0; l < PAGE / 4; l += LANES) {
                Ints word = load(page[n] + VALUE_CODES_AT + j * PAGE + 4 * l);
                UNROLL for (int b = 0; b < 4; b++)
                    UNROLL for (int i = 0; i < VALUE_CODES; i++) {
                        const int group = (j + i * VALUE_ROW) / VALUE_GROUP, position = n * PAGE + b * PAGE / 4 + l;
                        Floats code = code_of(word, b, i, VALUE_BITS);
                        UNROLL for (int g = 0; g < count; g++)
                            sum[g][i] += load_floats(&s->weight[group][first + g][position]) * code;
                    }
            }
        UNROLL for (int g = 0; g < count; g++)
            UNROLL for (int i = 0; i < VALUE_CODES; i++) {
                Floats *acc = &s->acc[first + g][j + i * VALUE_ROW];
                *acc = *acc * rescale[first + g] + sum[g][i];
            }
    }
}

/* Logits to softmax weights relative to the new maximum; returns what older results are multiplied by. */
static float softmax_step(float *logit, int count, float *max, float *sum) {
    float top = *max, total = 0;
    for (int t = 0; t < count; t++) top = logit[t] > top ? logit[t] : top;
    for (int t = 0; t < count; t++) total += logit[t] = exp2_negative(logit[t] - top);
    const float rescale = exp2_negative(*max - top);
    *max = top;
    *sum = *sum * rescale + total;
    return rescale;
}

/* Softmax weights of a block times the scales of their values, in the order of the bytes of value words. */
INLINE void weigh(Scratch *s, int num_pages, int group, int g) {
    float weight[BLOCK];
    Floats zero = {0};
    for (int t = 0; t < num_pages * PAGE; t += LANES) {
        Floats p = load_floats(&s->logit[g][t]), scaled = p * load_floats(&s->scale[group][t]);
        memcpy(&weight[t], &scaled, sizeof scaled);
        zero += p * load_floats(&s->scale_zero[group][t]);
    }
    s->zero[group][g] = zero;
    for (int n = 0; n < num_pages; n++)
        for (int l = 0; l < PAGE / 4; l++)
            UNROLL for (int b = 0; b < 4; b++)
                s->weight[group][g][n * PAGE + b * (PAGE / 4) + l] =
                    weight[n * PAGE + 4 * l + b] * (1.0f / (1 << code_shift(b, 0, VALUE_BITS)));
}

/* A block of pages; page[num_pages] is the one to fetch next. */
static void attend_pages(Scratch *s, const uint8_t *const *page, int num_pages, Partial *part) {
    float rescale[G];
    for (int n = 0; n < num_pages; n++) {
        transpose_keys(s, (const int32_t *)page[n]);
        if (KEYS_BY_CHANNEL) fold_queries(s, (const uint32_t *)(page[n] + KEY_META_AT));
        if (KEYS_SCALED)
            for (int t = 0; t < PAGE; t++) s->norm[t] = bf16(((const uint16_t *)(page[n] + KEY_NORM_AT))[t]);
        for (int group = 0; group < VALUE_GROUPS; group++) {
            const uint32_t *meta = (const uint32_t *)(page[n] + VALUE_META_AT) + group * PAGE;
            for (int t = 0; t < PAGE; t++) {
                const float scale = bits_to_float(meta[t] << 16);
                s->scale[group][n * PAGE + t] = scale;
                s->scale_zero[group][n * PAGE + t] = scale * bits_to_float(meta[t] & 0xffff0000u);
            }
        }
        for (int g = 0; g + QUERY_BLOCK <= G; g += QUERY_BLOCK)
            score_page(s, page[n], g, QUERY_BLOCK, &s->logit[g][n * PAGE], page[n + 1]);
        if (QUERY_REST)
            score_page(s, page[n], G - QUERY_REST, QUERY_REST, &s->logit[G - QUERY_REST][n * PAGE], page[n + 1]);
    }
    for (int g = 0; g < G; g++) {
        rescale[g] = softmax_step(s->logit[g], num_pages * PAGE, &part->max[g], &part->sum[g]);
        for (int d = 0; d < D; d++) part->out[g][d] *= rescale[g];
        for (int group = 0; group < VALUE_GROUPS; group++) weigh(s, num_pages, group, g);
    }
    for (int g = 0; g + QUERY_BLOCK <= G; g += QUERY_BLOCK) add_values(s, page, num_pages, rescale, g, QUERY_BLOCK);
    if (QUERY_REST) add_values(s, page, num_pages, rescale, G - QUERY_REST, QUERY_REST);
}

/* `count` consecutive rows of a BF16 window. */
static void attend_rows(Scratch *s, const uint16_t *k, const uint16_t *v, int count, Partial *part) {
    float row[D];
    for (; count > 0; count -= BLOCK, k += BLOCK * D, v += BLOCK * D) {
        const int rows = count < BLOCK ? count : BLOCK;
        for (int t = 0; t < rows; t++) {
            for (int d = 0; d < D; d++) row[d] = bf16(k[t * D + d]);
            for (int g = 0; g < G; g++) {
                float dot = 0;
                for (int d = 0; d < D; d++) dot += s->q[g][d] * row[d];
                s->logit[g][t] = dot;
            }
        }
        for (int g = 0; g < G; g++) {
            const float rescale = softmax_step(s->logit[g], rows, &part->max[g], &part->sum[g]);
            for (int d = 0; d < D; d++) part->out[g][d] *= rescale, s->acc[g][d] *= rescale;
        }
        for (int t = 0; t < rows; t++) {
            for (int d = 0; d < D; d++) row[d] = bf16(v[t * D + d]);
            for (int g = 0; g < G; g++)
                for (int d = 0; d < D; d++) part->out[g][d] += s->logit[g][t] * row[d];
        }
    }
}

/* Query heads [G][D] of one KV head times scaling / ln 2, what score_page() needs of them, and an empty result. */
static void start_task(Scratch *s, const float *q, float scaling, Partial *part) {
    memset(s->acc, 0, sizeof s->acc);
    memset(s->q_sum, 0, sizeof s->q_sum);
    memset(part, 0, sizeof *part);
    for (int d = 0; d < D; d++) s->unit[d] = 1.0f / (1 << code_shift(d % KEY_ROW % 4, d / KEY_ROW, KEY_BITS));
    for (int g = 0; g < G; g++) {
        part->max[g] = LOWEST;
        for (int d = 0; d < D; d++) {
            s->q[g][d] = q[g * D + d] * scaling * LOG2_E;
            s->q_code[0][g][d] = s->q[g][d] * s->unit[d];
            s->q_sum[d / KEY_CHANNELS][g] += s->q[g][d];
        }
    }
}

/* Add what was accumulated over pages to the result of the task. */
static void finish_task(const Scratch *s, Partial *part) {
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d++) {
            float total = 0;
            for (int lane = 0; lane < LANES; lane++) total += s->acc[g][d][lane];
            part->out[g][d] += total / (1 << code_shift(0, d / VALUE_ROW, VALUE_BITS));
        }
}

/* Partial results of one row and KV head to its output [G][D] and log-sum-exp [G]; zeros where there is no token. */
static void merge(const Partial *part, int splits, float *out, float *lse) {
    memset(out, 0, G * D * sizeof *out);
    for (int g = 0; g < G; g++) {
        float max = LOWEST, sum = 0;
        for (int n = 0; n < splits; n++) max = part[n].max[g] > max ? part[n].max[g] : max;
        for (int n = 0; n < splits; n++) {
            const float weight = exp2_negative(part[n].max[g] - max);
            sum += weight * part[n].sum[g];
            for (int d = 0; d < D; d++) out[g * D + d] += weight * part[n].out[g][d];
        }
        for (int d = 0; d < D; d++) out[g * D + d] = sum > 0 ? out[g * D + d] / sum : 0;
        lse[g] = sum > 0 ? max / LOG2_E + logf(sum) : 0;
    }
}

/* Shapes as in LayerCache, q and out [B][K G][D], lse [B][K G], rows of `table` table_stride apart. Returns 1 where
   memory is short. */
int attend(const float *q, const uint8_t *pages, const int32_t *table, const int32_t *num_pages,
           const int32_t *num_tokens, const uint16_t *sink_k, const uint16_t *sink_v, const uint16_t *recent_k,
           const uint16_t *recent_v, float *out, float *lse, int B, int K, int64_t table_stride, int S, int W,
           float scaling, int threads) {
    int64_t blocks = 0, most_pages = 0;
    for (int row = 0; row < B; row++) {
        blocks += (int64_t)K * ((num_pages[row] + BLOCK_PAGES - 1) / BLOCK_PAGES);
        most_pages = num_pages[row] > most_pages ? num_pages[row] : most_pages;
    }
    const int wanted = TASKS_PER_THREAD * threads;
    const int split_pages = BLOCK_PAGES * (int)((blocks + wanted - 1) / wanted); /* 0 when nothing is packed */
    const int splits = most_pages ? (int)((most_pages + split_pages - 1) / split_pages) : 1;
    Partial *parts = malloc(sizeof(Partial) * B * K * splits);
    int *done = calloc((size_t)B * K, sizeof *done); /* splits that ended, of each row and KV head */
    if (!parts || !done) return free(parts), free(done), 1;
#pragma omp parallel num_threads(threads)
    {
        static _Thread_local Scratch scratch;
        Scratch *s = &scratch;
        __asm__("" : "+r"(s)); /* a compiler that knows where s comes from looks its address up again inside loops */
#pragma omp for schedule(dynamic) nowait
        for (int task = 0; task < B * K * splits; task++) {
            const int pair = task / splits, split = task % splits, row = pair / K, head = pair % K;
            Partial *part = &parts[task];
            start_task(s, q + (size_t)pair * G * D, scaling, part);
            if (split == 0) {
                const int sink = num_tokens[row] < S ? num_tokens[row] : S, first = PAGE * num_pages[row];
                const int recent = num_tokens[row] - sink - first, slot = recent > 0 ? first % W : 0;
                const int until_wrap = recent < W - slot ? recent : W - slot;
                const size_t at_sink = (size_t)pair * S * D, at_recent = (size_t)pair * W * D;
                const size_t at_slot = at_recent + (size_t)slot * D;
                attend_rows(s, sink_k + at_sink, sink_v + at_sink, sink, part);
                attend_rows(s, recent_k + at_slot, recent_v + at_slot, until_wrap, part);
                attend_rows(s, recent_k + at_recent, recent_v + at_recent, recent - until_wrap, part);
            }
            const int start = split * split_pages, limit = num_pages[row];
            const int end = start + split_pages < limit ? start + split_pages : limit;
            for (int n = start; n < end; n += BLOCK_PAGES) {
                const uint8_t *page[BLOCK_PAGES + 1];
                const int count = end - n < BLOCK_PAGES ? end - n : BLOCK_PAGES;
                for (int i = 0; i <= count; i++) {
                    const int column = n + i < end ? n + i : n; /* the last task has no next page */
                    page[i] = pages + ((size_t)table[row * table_stride + column] * K + head) * PAGE_BYTES;
                }
                attend_pages(s, page, count, part);
            }
            finish_task(s, part);
            /* Whoever ends last merges: a barrier more would cost more wherever threads have to wait for a core. */
            if (__atomic_add_fetch(&done[pair], 1, __ATOMIC_ACQ_REL) == splits)
                merge(parts + (size_t)pair * splits, splits, out + (size_t)pair * G * D, lse + (size_t)pair * G);
        }
    }
    free(parts);
    free(done);
    return 0;
}
