/* Attention of the new tokens of one forward over keys and values that lie in pieces, in bf16, and what stands around it in a
 * decoder layer where torch takes several calls for a few thousand numbers.
 *
 * Stretches of keys and values are read where they lie. Each is cut into chunks of keys, a thread takes a chunk for one KV head
 * with the queries of all its readers (the query heads that share a KV head are more queries), and the parts of a query's
 * softmax are joined by their maxima and sums at the end (the identity of FlashAttention, arXiv 2205.14135, and Hydragen,
 * arXiv 2402.05099). Scores and sums are fp32; keys, values and probabilities enter the products as bf16.
 *
 * Knows numbers and addresses; knows no Python, allocates nothing, keeps nothing. Threads are those of the OpenMP runtime that
 * the caller names, so that there is one pool of them in the process.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { BLOCK = 64,        /* keys at a time */
       AT_ONCE = 6,       /* queries whose sums fit into registers */
       MOST_QUERIES = 96, /* of one KV head over one packed block: they and their sums stay in the second-level cache */
       ABI = 2 };

typedef struct {
    uint16_t *kv;                      /* of layer 0: the keys of KV head 0, first token */
    int64_t layer, value, head, token; /* strides in numbers; value: from keys to values */
    int32_t length, first, count;      /* tokens; its readers are readers[first .. first + count) */
    int32_t unused;
} Stretch;

typedef struct {
    int32_t row, seen; /* a new token and how many tokens of the stretch, from its first, it attends to */
} Reader;

typedef struct {
    int32_t stretch, at; /* where a new token's own key and value go */
} Slot;

typedef struct {
    int32_t stretch, start, stop, first, count; /* keys [start, stop) for readers[first .. first + count) */
    int32_t unused;
    int64_t part; /* place of its first part, in numbers of scratch.parts */
} Chunk;

typedef struct {
    int32_t chunk, reader;
} Share; /* one chunk that a row has a part in, and which of the chunk's readers the row is */

typedef struct {
    const Stretch *stretches;
    const Reader *readers;
    const Slot *slots;
    int32_t num_stretches, num_readers, num_rows, num_shares; /* work is cut for num_shares threads */
    int32_t num_heads, num_kv_heads, dim, num_threads;
    float scale; /* of scores, times log2(e): softmax is computed in powers of two */
    int32_t num_chunks;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or NULL */
    /* Laid into scratch by aaflow_prepare. */
    Chunk *chunks;
    Share *shares;
    int32_t *first_share; /* [num_rows + 1] */
    float *parts;         /* of every (chunk, KV head, reader, query head): sum of weighted values [dim], maximum, sum */
    char *rooms;          /* one per thread */
    int64_t room_bytes;
    int64_t cost;
} Plan;

EXPORT int aaflow_abi(void) { return ABI; }
EXPORT int64_t aaflow_plan_bytes(void) { return sizeof(Plan); }

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Keys of a chunk of a stretch with so many queries per KV head: a fixed share of all work, in whole blocks. */
static int32_t chunk_keys(int64_t total, const Plan *plan, int32_t queries) {
    int64_t target = total / ((int64_t)plan->num_shares * 6) + 1;
    int64_t keys = target / (12 + 5 * (int64_t)queries) / BLOCK * BLOCK;
    return (int32_t)(keys < 4 * BLOCK ? 4 * BLOCK : keys);
}

static int32_t readers_at_once(const Plan *plan) {
    int32_t count = MOST_QUERIES / (plan->num_heads / plan->num_kv_heads);
    return count < 1 ? 1 : count;
}

/* Calls for every chunk in order; writes them when chunks is not NULL. Returns their number. */
static int32_t cut(const Plan *plan, int64_t total, Chunk *chunks, int64_t *num_parts, int64_t *num_shares) {
    const int32_t group = plan->num_heads / plan->num_kv_heads, most = readers_at_once(plan);
    int32_t number = 0;
    *num_parts = 0;
    *num_shares = 0;
    for (int32_t s = 0; s < plan->num_stretches; s++) {
        const Stretch *stretch = &plan->stretches[s];
        for (int32_t r = 0; r < stretch->count; r += most) {
            int32_t count = stretch->count - r < most ? stretch->count - r : most, seen = 0;
            for (int32_t i = 0; i < count; i++) {
                int32_t own = plan->readers[stretch->first + r + i].seen;
                seen = own > seen ? own : seen;
            }
            int32_t step = chunk_keys(total, plan, count * group);
            for (int32_t start = 0; start < seen; start += step) {
                int32_t stop = seen - start < step ? seen : start + step;
                if (chunks)
                    chunks[number] = (Chunk){s, start, stop, stretch->first + r, count, 0, *num_parts};
                number++;
                *num_parts += (int64_t)count * plan->num_heads * (plan->dim + 2);
                *num_shares += count;
            }
        }
    }
    return number;
}

static int64_t all_work(const Plan *plan) {
    const int64_t group = plan->num_heads / plan->num_kv_heads;
    int64_t total = 0;
    for (int32_t s = 0; s < plan->num_stretches; s++)
        total += plan->stretches[s].length * (12 + 5 * group * plan->stretches[s].count) * plan->num_kv_heads;
    return total;
}

static int64_t room_bytes(const Plan *plan) {
    int64_t group = plan->num_heads / plan->num_kv_heads, dim = plan->dim;
    int64_t queries = group * readers_at_once(plan);
    return 2 * round_up(BLOCK * dim * 2)     /* keys and values of a block */
           + round_up(queries * dim * 2)     /* queries */
           + AT_ONCE * BLOCK * (4 + 2) + 64  /* scores, probabilities and factors of some */
           + 2 * round_up(queries * 4);      /* maxima, sums */
}

/* Bytes that aaflow_prepare needs; 0 when the plan's shape is none of ours. */
EXPORT int64_t aaflow_scratch_bytes(const Plan *plan) {
    int64_t num_parts, num_shares;
    if (plan->num_kv_heads < 1 || plan->num_heads % plan->num_kv_heads || plan->dim % 32 || plan->dim < 32 || plan->dim > 256)
        return 0;
    if (plan->num_heads / plan->num_kv_heads > MOST_QUERIES || plan->num_threads < 1 || plan->num_shares < 1)
        return 0;
    int32_t num_chunks = cut(plan, all_work(plan), NULL, &num_parts, &num_shares);
    return 64 + round_up(num_chunks * (int64_t)sizeof(Chunk)) + round_up(num_shares * (int64_t)sizeof(Share)) +
           round_up((plan->num_rows + 1) * 4) + round_up(num_parts * 4) + plan->num_threads * round_up(room_bytes(plan));
}

/* Lays out the plan's chunks in scratch. The same scratch serves until the next plan. */
EXPORT void aaflow_prepare(Plan *plan, char *scratch) {
    int64_t num_parts, num_shares;
    char *at = (char *)(((uintptr_t)scratch + 63) / 64 * 64);
    plan->cost = all_work(plan);
    plan->chunks = (Chunk *)at;
    plan->num_chunks = cut(plan, plan->cost, plan->chunks, &num_parts, &num_shares);
    at += round_up(plan->num_chunks * (int64_t)sizeof(Chunk));
    plan->shares = (Share *)at;
    at += round_up(num_shares * (int64_t)sizeof(Share));
    plan->first_share = (int32_t *)at;
    at += round_up((plan->num_rows + 1) * 4);
    plan->parts = (float *)at;
    at += round_up(num_parts * 4);
    plan->rooms = at;
    plan->room_bytes = round_up(room_bytes(plan));
    /* Count, add up, deal out; dealing out moves every row's first share to where the next row's was. */
    int32_t *first = plan->first_share;
    memset(first, 0, (plan->num_rows + 1) * 4);
    for (int32_t c = 0; c < plan->num_chunks; c++)
        for (int32_t i = 0; i < plan->chunks[c].count; i++)
            first[plan->readers[plan->chunks[c].first + i].row]++;
    for (int32_t row = 0, sum = 0; row <= plan->num_rows; row++) {
        int32_t count = first[row];
        first[row] = sum;
        sum += count;
    }
    for (int32_t c = 0; c < plan->num_chunks; c++)
        for (int32_t i = 0; i < plan->chunks[c].count; i++)
            plan->shares[first[plan->readers[plan->chunks[c].first + i].row]++] = (Share){c, i};
    for (int32_t row = plan->num_rows; row > 0; row--)
        first[row] = first[row - 1];
    first[0] = 0;
}

#if defined(__x86_64__)
#include <immintrin.h>

EXPORT int aaflow_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define INLINE static inline WIDE __attribute__((always_inline))

INLINE __m512 widen(__m256i numbers) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16)); }
INLINE __m256i narrow(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

/* 2^x for x <= 0; far below zero it is zero. Relative error 3e-6, a thousandth of what bf16 keeps. */
INLINE __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x); /* in this order what is no number stays none */
    __m512 whole = _mm512_roundscale_ps(x, 8);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(0.0013333558f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.0096181291f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.0555041086f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.2402265069f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.6931471806f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* Transposes 16 x 16 dwords: out[d] holds dword d of all 16 rows. */
INLINE void transpose(const __m512i *rows, uint32_t *out, int64_t stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* b[4 q + i] holds dwords i, i + 4, i + 8, i + 12 of rows 4 q to 4 q + 3 */
        __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        _mm512_store_si512(out + i * stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_store_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_store_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_store_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* Keys of a block as [dim / 2][BLOCK] pairs of neighbouring numbers; keys from count on are zero. */
WIDE static void pack_keys(const uint16_t *keys, int64_t stride, int32_t count, int32_t dim, uint32_t *out) {
    for (int32_t key = 0; key < BLOCK; key += 16) {
        int32_t at = 0;
        for (; at + 32 <= dim; at += 32) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++)
                rows[i] = key + i < count ? _mm512_loadu_si512(keys + (key + i) * stride + at) : _mm512_setzero_si512();
            transpose(rows, out + (int64_t)at / 2 * BLOCK + key, BLOCK);
        }
    }
}

/* Values of a block as [BLOCK / 2][dim] pairs of neighbouring tokens; tokens from count on are zero. */
WIDE static void pack_values(const uint16_t *values, int64_t stride, int32_t count, int32_t dim, uint32_t *out) {
    const __m512i ascending = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    /* Word i of the one and word i of the other, for the lower and the upper 16. */
    const __m512i low = _mm512_or_si512(ascending, _mm512_slli_epi32(_mm512_add_epi32(ascending, _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int32_t pair = 0; pair < BLOCK / 2; pair++)
        for (int32_t at = 0; at < dim; at += 32) {
            const uint16_t *first = values + 2 * pair * stride + at;
            __m512i one = 2 * pair < count ? _mm512_loadu_si512(first) : _mm512_setzero_si512();
            __m512i other = 2 * pair + 1 < count ? _mm512_loadu_si512(first + stride) : _mm512_setzero_si512();
            _mm512_store_si512(out + pair * dim + at, _mm512_permutex2var_epi16(one, low, other));
            _mm512_store_si512(out + pair * dim + at + 16, _mm512_permutex2var_epi16(one, high, other));
        }
}

/* Scores of some queries over a block. */
INLINE void score(const uint32_t *keys, const uint32_t *queries, float *scores, int32_t pairs, const int num) {
    __m512 sums[AT_ONCE][4];
    for (int i = 0; i < num; i++)
        for (int j = 0; j < 4; j++)
            sums[i][j] = _mm512_setzero_ps();
    for (int32_t pair = 0; pair < pairs; pair++) {
        __m512i four[4];
        for (int j = 0; j < 4; j++)
            four[j] = _mm512_load_si512(keys + pair * BLOCK + 16 * j);
        for (int i = 0; i < num; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)queries[i * pairs + pair]);
            for (int j = 0; j < 4; j++)
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)four[j], both);
        }
    }
    for (int i = 0; i < num; i++)
        for (int j = 0; j < 4; j++)
            _mm512_store_ps(scores + i * BLOCK + 16 * j, sums[i][j]);
}

/* Adds a block's weighted values to some queries' sums, which are scaled first. */
INLINE void weigh(const uint32_t *values, const uint32_t *weights, float *out, int64_t stride, const float *factors, int32_t dim,
                  const int num, const int wide) {
    __m512 sums[AT_ONCE][4];
    for (int i = 0; i < num; i++)
        for (int j = 0; j < wide; j++)
            sums[i][j] = _mm512_mul_ps(_mm512_loadu_ps(out + i * stride + 16 * j), _mm512_set1_ps(factors[i]));
    for (int32_t pair = 0; pair < BLOCK / 2; pair++) {
        __m512i some[4];
        for (int j = 0; j < wide; j++)
            some[j] = _mm512_load_si512(values + pair * dim + 16 * j);
        for (int i = 0; i < num; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)weights[i * (BLOCK / 2) + pair]);
            for (int j = 0; j < wide; j++)
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)some[j], both);
        }
    }
    for (int i = 0; i < num; i++)
        for (int j = 0; j < wide; j++)
            _mm512_storeu_ps(out + i * stride + 16 * j, sums[i][j]);
}

#define BY_NUMBER(num, call)                                                                                                   \
    switch (num) {                                                                                                             \
    case 1: call(1); break;                                                                                                    \
    case 2: call(2); break;                                                                                                    \
    case 3: call(3); break;                                                                                                    \
    case 4: call(4); break;                                                                                                    \
    case 5: call(5); break;                                                                                                    \
    default: call(6); break;                                                                                                   \
    }

WIDE static void score_some(const uint32_t *keys, const uint32_t *queries, float *scores, int32_t pairs, int num) {
#define CALL(n) score(keys, queries, scores, pairs, n)
    BY_NUMBER(num, CALL)
#undef CALL
}

WIDE static void weigh_some(const uint32_t *values, const uint32_t *weights, float *out, int64_t stride, const float *factors,
                            int32_t dim, int num) {
    int32_t at = 0;
    for (; at + 64 <= dim; at += 64) {
#define CALL(n) weigh(values + at, weights, out + at, stride, factors, dim, n, 4)
        BY_NUMBER(num, CALL)
#undef CALL
    }
    if (at < dim) {
#define CALL(n) weigh(values + at, weights, out + at, stride, factors, dim, n, 2)
        BY_NUMBER(num, CALL)
#undef CALL
    }
}

/* Powers of a block's scores relative to the query's maximum so far, as bf16 pairs; keys from seen on count for nothing. */
WIDE static void soften(const float *scores, int32_t seen, float scale, float *maximum, float *sum, float *factor, uint16_t *out) {
    __m512 some[4];
    for (int j = 0; j < 4; j++) {
        some[j] = _mm512_mul_ps(_mm512_load_ps(scores + 16 * j), _mm512_set1_ps(scale));
        if (seen < 16 * (j + 1)) {
            __mmask16 kept = seen <= 16 * j ? 0 : (__mmask16)((1u << (seen - 16 * j)) - 1);
            some[j] = _mm512_mask_blend_ps(kept, _mm512_set1_ps(-1e30f), some[j]);
        }
    }
    float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(some[0], some[1]), _mm512_max_ps(some[2], some[3])));
    most = most > *maximum ? most : *maximum;
    __m512 total = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) {
        some[j] = power_of_two(_mm512_sub_ps(some[j], _mm512_set1_ps(most)));
        total = _mm512_add_ps(total, some[j]);
    }
    *factor = most == *maximum ? 1.0f : _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(*maximum - most)));
    *sum = *sum * *factor + _mm512_reduce_add_ps(total);
    *maximum = most;
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(some[1], some[0]));
    _mm512_store_si512(out + 32, (__m512i)_mm512_cvtne2ps_pbh(some[3], some[2]));
}

/* Asks for a share of the next block's lines: num of whole parts of it are asked for one after the other. */
WIDE static void ask_for(const uint16_t *rows, int64_t value, int64_t stride, int32_t count, int32_t dim, int32_t number,
                         int32_t num) {
    for (int32_t row = count * number / num; row < count * (number + 1) / num; row++)
        for (int32_t at = 0; at < dim; at += 32) {
            _mm_prefetch((const char *)(rows + row * stride + at), _MM_HINT_T0);
            _mm_prefetch((const char *)(rows + value + row * stride + at), _MM_HINT_T0);
        }
}

typedef struct {
    const Plan *plan;
    int32_t layer;
    const uint16_t *query;
    int64_t query_row, query_head;
    uint16_t *out;
    atomic_int next, done, next_room;
} Pass;

WIDE static void attend_chunk(const Pass *pass, const Chunk *chunk, int32_t head, char *room) {
    const Plan *plan = pass->plan;
    const Stretch *stretch = &plan->stretches[chunk->stretch];
    const int32_t group = plan->num_heads / plan->num_kv_heads, dim = plan->dim, num = chunk->count * group;
    const int64_t part = dim + 2;
    float *parts = plan->parts + chunk->part + (int64_t)head * num * part;
    uint32_t *keys = (uint32_t *)room;
    uint32_t *values = (uint32_t *)(room += round_up(BLOCK * dim * 2));
    uint16_t *queries = (uint16_t *)(room += round_up(BLOCK * dim * 2));
    const int64_t most = (int64_t)readers_at_once(plan) * group;
    float *scores = (float *)(room += round_up(most * dim * 2));
    uint16_t *weights = (uint16_t *)(room += AT_ONCE * BLOCK * 4);
    float *factors = (float *)(room += AT_ONCE * BLOCK * 2);
    float *maxima = (float *)(room += 64);
    float *sums = (float *)(room + round_up(most * 4));

    for (int32_t i = 0; i < num; i++) {
        int64_t row = plan->readers[chunk->first + i / group].row;
        memcpy(queries + i * dim, pass->query + row * pass->query_row + (head * group + i % group) * pass->query_head, dim * 2);
        memset(parts + i * part, 0, dim * 4);
        maxima[i] = -1e30f;
        sums[i] = 0.0f;
    }
    const uint16_t *first = stretch->kv + pass->layer * stretch->layer + head * stretch->head;
    for (int32_t at = chunk->start; at < chunk->stop; at += BLOCK) {
        int32_t count = chunk->stop - at < BLOCK ? chunk->stop - at : BLOCK;
        /* Readers stand in the order of what they see, so those that see nothing of this block are the first. */
        int32_t skipped = 0;
        while (skipped < chunk->count && plan->readers[chunk->first + skipped].seen <= at)
            skipped++;
        pack_keys(first + at * stretch->token, stretch->token, count, dim, keys);
        pack_values(first + stretch->value + at * stretch->token, stretch->token, count, dim, values);
        int32_t next = chunk->stop - at - BLOCK;
        next = next < 0 ? 0 : next < BLOCK ? next : BLOCK;
        for (int32_t i = skipped * group; i < num; i += AT_ONCE) {
            int32_t some = num - i < AT_ONCE ? num - i : AT_ONCE;
            ask_for(first + (at + BLOCK) * stretch->token, stretch->value, stretch->token, next, dim,
                    (i - skipped * group) / AT_ONCE, (num - skipped * group + AT_ONCE - 1) / AT_ONCE);
            score_some(keys, (uint32_t *)(queries + i * dim), scores, dim / 2, some);
            for (int32_t j = 0; j < some; j++) {
                int32_t seen = plan->readers[chunk->first + (i + j) / group].seen - at;
                soften(scores + j * BLOCK, seen < count ? seen : count, plan->scale, &maxima[i + j], &sums[i + j], &factors[j],
                       weights + j * BLOCK);
            }
            weigh_some(values, (uint32_t *)weights, parts + i * part, part, factors, dim, some);
        }
    }
    for (int32_t i = 0; i < num; i++) {
        parts[i * part + dim] = maxima[i];
        parts[i * part + dim + 1] = sums[i];
    }
}

/* Joins the parts of one new token. */
WIDE static void join_row(const Pass *pass, int32_t row) {
    const Plan *plan = pass->plan;
    const int32_t group = plan->num_heads / plan->num_kv_heads, dim = plan->dim;
    const int32_t from = plan->first_share[row], to = plan->first_share[row + 1];
    const int64_t part = dim + 2;
    for (int32_t head = 0; head < plan->num_heads; head++) {
        float most = -1e30f, total = 0.0f;
        __m512 sums[16];
        for (int j = 0; j < dim / 16; j++)
            sums[j] = _mm512_setzero_ps();
        for (int32_t i = from; i < to; i++) {
            const Chunk *chunk = &plan->chunks[plan->shares[i].chunk];
            int64_t at = ((int64_t)head / group * chunk->count + plan->shares[i].reader) * group + head % group;
            const float *mine = plan->parts + chunk->part + at * part;
            float maximum = mine[dim];
            if (mine[dim + 1] == 0.0f)
                continue;
            float next = maximum > most ? maximum : most;
            __m512 old = power_of_two(_mm512_set1_ps(most - next)), new = power_of_two(_mm512_set1_ps(maximum - next));
            for (int j = 0; j < dim / 16; j++)
                sums[j] = _mm512_fmadd_ps(new, _mm512_loadu_ps(mine + 16 * j), _mm512_mul_ps(old, sums[j]));
            total = total * _mm512_cvtss_f32(old) + mine[dim + 1] * _mm512_cvtss_f32(new);
            most = next;
        }
        __m512 share = _mm512_set1_ps(1.0f / total);
        uint16_t *out = pass->out + ((int64_t)row * plan->num_heads + head) * dim;
        for (int j = 0; j < dim / 16; j++)
            _mm256_storeu_si256((__m256i *)(out + 16 * j), narrow(_mm512_mul_ps(sums[j], share)));
    }
}

static void work(void *data) {
    Pass *pass = data;
    const Plan *plan = pass->plan;
    const int32_t num_tasks = plan->num_chunks * plan->num_kv_heads;
    char *room = plan->rooms + atomic_fetch_add(&pass->next_room, 1) * plan->room_bytes;
    for (int32_t task; (task = atomic_fetch_add(&pass->next, 1)) < num_tasks;) {
        attend_chunk(pass, &plan->chunks[task / plan->num_kv_heads], task % plan->num_kv_heads, room);
        /* Nobody waits for the others: whoever is last joins. */
        if (atomic_fetch_add(&pass->done, 1) + 1 == num_tasks)
            for (int32_t row = 0; row < plan->num_rows; row++)
                join_row(pass, row);
    }
}

/* out = bf16(x cos) + swapped x * sin, as torch's mul and addcmul round it. */
WIDE static void rotate(uint16_t *x, const uint16_t *cosines, const uint16_t *sines, int32_t dim) {
    const int32_t half = dim / 2;
    for (int32_t at = 0; at < half; at += 16) {
        __m512 low = widen(_mm256_loadu_si256((__m256i *)(x + at))), high = widen(_mm256_loadu_si256((__m256i *)(x + half + at)));
        __m512 turned = widen(narrow(_mm512_mul_ps(low, widen(_mm256_loadu_si256((__m256i *)(cosines + at))))));
        __m512 turned2 = widen(narrow(_mm512_mul_ps(high, widen(_mm256_loadu_si256((__m256i *)(cosines + half + at))))));
        turned = _mm512_fmadd_ps(high, widen(_mm256_loadu_si256((__m256i *)(sines + at))), turned);
        turned2 = _mm512_fmadd_ps(low, widen(_mm256_loadu_si256((__m256i *)(sines + half + at))), turned2);
        _mm256_storeu_si256((__m256i *)(x + at), narrow(turned));
        _mm256_storeu_si256((__m256i *)(x + half + at), narrow(turned2));
    }
}

/* Puts the new keys and values of a layer where the plan's slots say. */
EXPORT void aaflow_store(const Plan *plan, int32_t layer, const uint16_t *key, int64_t key_row, int64_t key_head,
                         const uint16_t *value, int64_t value_row, int64_t value_head) {
    const int64_t bytes = (int64_t)plan->dim * 2;
    for (int32_t row = 0; row < plan->num_rows; row++) {
        const Stretch *stretch = &plan->stretches[plan->slots[row].stretch];
        uint16_t *to = stretch->kv + layer * stretch->layer + plan->slots[row].at * stretch->token;
        for (int32_t head = 0; head < plan->num_kv_heads; head++) {
            memcpy(to + head * stretch->head, key + row * key_row + head * key_head, bytes);
            memcpy(to + head * stretch->head + stretch->value, value + row * value_row + head * value_head, bytes);
        }
    }
}

/* query [rows, Hq, D] with these strides over everything each row attends to: out [rows, Hq * D]. */
EXPORT void aaflow_attend(const Plan *plan, int32_t layer, const uint16_t *query, int64_t query_row, int64_t query_head,
                          uint16_t *out) {
    Pass pass = {plan, layer, query, query_row, query_head, out, 0, 0, 0};
    if (plan->parallel && plan->num_threads > 1 && plan->cost > 100000)
        plan->parallel(work, &pass, (unsigned)plan->num_threads, 0);
    else
        work(&pass);
}

/* One layer of a decoder whose queries, keys and values lie as [rows, Hq + 2 H, D] without gaps: rotates queries and keys in
 * place by the tables [rows, D] (the first half of the sines with its sign turned), stores, attends. */
EXPORT void aaflow_layer(const Plan *plan, int32_t layer, uint16_t *qkv, const uint16_t *cosines, const uint16_t *sines,
                         uint16_t *out) {
    const int64_t dim = plan->dim, row_stride = (plan->num_heads + 2 * plan->num_kv_heads) * dim;
    for (int32_t row = 0; row < plan->num_rows; row++)
        for (int32_t head = 0; head < plan->num_heads + plan->num_kv_heads; head++)
            rotate(qkv + row * row_stride + head * dim, cosines + row * dim, sines + row * dim, (int32_t)dim);
    const uint16_t *keys = qkv + plan->num_heads * dim;
    aaflow_store(plan, layer, keys, row_stride, dim, keys + plan->num_kv_heads * dim, row_stride, dim);
    aaflow_attend(plan, layer, qkv, row_stride, dim, out);
}

/* hidden [rows, width] += delta, unless delta is NULL; out is the RMS norm of that times weight. width is a multiple of 16. */
EXPORT WIDE void aaflow_add_norm(uint16_t *hidden, const uint16_t *delta, const uint16_t *weight, float eps, uint16_t *out,
                                 int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, hidden += width, out += width) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t at = 0; at < width; at += 16) {
            __m512 some = widen(_mm256_loadu_si256((__m256i *)(hidden + at)));
            if (delta) {
                __m256i sum = narrow(_mm512_add_ps(some, widen(_mm256_loadu_si256((__m256i *)(delta + row * width + at)))));
                _mm256_storeu_si256((__m256i *)(hidden + at), sum);
                some = widen(sum);
            }
            squares = _mm512_fmadd_ps(some, some, squares);
        }
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / (float)width + eps);
        __m512 scale = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(mean));
        for (int64_t at = 0; at < width; at += 16) {
            __m512 some = _mm512_mul_ps(widen(_mm256_loadu_si256((__m256i *)(hidden + at))), scale);
            some = _mm512_mul_ps(some, widen(_mm256_loadu_si256((__m256i *)(weight + at))));
            _mm256_storeu_si256((__m256i *)(out + at), narrow(some));
        }
    }
}

/* out [rows, width] = silu(gate) * up of gate and up beside each other, [rows, 2 width]. width is a multiple of 16. */
EXPORT WIDE void aaflow_gate(const uint16_t *gate_up, uint16_t *out, int64_t rows, int64_t width) {
    const __m512 one = _mm512_set1_ps(1.0f), log2e = _mm512_set1_ps(1.44269504f);
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        for (int64_t at = 0; at < width; at += 16) {
            __m512 gate = widen(_mm256_loadu_si256((__m256i *)(gate_up + at)));
            __m512 up = widen(_mm256_loadu_si256((__m256i *)(gate_up + width + at)));
            __m512 small = power_of_two(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)), log2e));
            __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
            __m512 share = _mm512_div_ps(_mm512_mask_blend_ps(negative, one, small), _mm512_add_ps(one, small));
            __m512 soft = widen(narrow(_mm512_mul_ps(gate, share)));
            _mm256_storeu_si256((__m256i *)(out + at), narrow(_mm512_mul_ps(soft, up)));
        }
}

#else

EXPORT int aaflow_supported(void) { return 0; }

#endif
