// Attention, one warp per query or key, in f32, and rotary embeddings.
//
// A tile is as many keys (or queries) as a warp has lanes: each lane computes one score, then the lanes share the columns of the heads.

#include "common.cuh"

// Sizes, mask and layout; `Sizes` in `run/attention.rs`. Strides are in elements. `window` is 0 for none, `soft_cap` 0 for none.
struct Attention {
    u64 batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim, num_keys;
    // Distance of rows of queries, keys and values, and the number of rows of keys and values of a sequence.
    u64 query_stride, key_stride, value_stride, rows_per_sequence;
    u64 is_causal, window;
    Positions queries, keys;
    const u32* padding_starts;
    const u32* document_starts;
    float scale, soft_cap;
};

// Largest dim of heads, and columns of each lane.
constexpr int DIM_MAX = 256, COLUMNS = DIM_MAX / WARP;

// A query of a head.
struct Query {
    u64 sequence, head, index;
};

// The query of an item, of as many items as there are queries of all heads.
__device__ inline Query query_at(const Attention& at, u64 item) {
    return {item / at.seq_len / at.num_heads, item / at.seq_len % at.num_heads, item % at.seq_len};
}

__device__ inline u64 row_of(const Attention& at, Query query) {
    return query.sequence * at.seq_len + query.index;
}

__device__ inline u64 statistics_of(const Attention& at, Query query) {
    return (query.sequence * at.num_heads + query.head) * at.seq_len + query.index;
}

__device__ inline bool is_visible(const Attention& at, Query query, u64 key) {
    u64 position = position_at(at.keys, key);
    if (at.padding_starts && position >= at.padding_starts[query.sequence]) {
        return false;
    }
    if (!at.is_causal) {
        return true;
    }
    u64 own = position_at(at.queries, query.index);
    u64 document = at.document_starts ? at.document_starts[row_of(at, query)] : 0;
    return position <= own && position >= document && (at.window == 0 || position + at.window > own);
}

template <class T> __device__ inline float dot(const T* left, const T* right, u64 len) {
    float sum = 0.0f;
    for (u64 i = 0; i < len; ++i) {
        sum = fmaf(to_f32(left[i]), to_f32(right[i]), sum);
    }
    return sum;
}

// A score, and the factor of its gradient.
struct Score {
    float value, slope;
};

__device__ inline Score score_of(const Attention& at, float product) {
    float scaled = product * at.scale;
    if (at.soft_cap == 0.0f) {
        return {scaled, at.scale};
    }
    float t = tanhf(scaled / at.soft_cap);
    return {at.soft_cap * t, at.scale * (1.0f - t * t)};
}

// Adds `weight * row[col]` to the columns of each lane.
template <class T> __device__ inline void add_row(float* sums, float weight, const T* row, u64 len) {
    int lane = threadIdx.x % WARP;
    for (int column = 0; column < COLUMNS; ++column) {
        u64 col = u64(column) * WARP + lane;
        if (col < len) {
            sums[column] = fmaf(weight, to_f32(row[col]), sums[column]);
        }
    }
}

template <class T> __device__ inline void write_row(const float* sums, T* row, u64 len, bool accumulate) {
    int lane = threadIdx.x % WARP;
    for (int column = 0; column < COLUMNS; ++column) {
        u64 col = u64(column) * WARP + lane;
        if (col < len) {
            row[col] = from_f32<T>(accumulate ? to_f32(row[col]) + sums[column] : sums[column]);
        }
    }
}

// Whether the mask hides a key and all keys after it.
__device__ inline bool is_past(const Attention& at, Query query, u64 first_key) {
    return at.is_causal && position_at(at.keys, first_key) > position_at(at.queries, query.index);
}

// `has_earlier` says whether `y` and `log_sums` hold the results for earlier keys, which the results are merged into.
template <class T, class Y>
__device__ void attention(
    const Attention& at, const T* queries, const T* keys, const T* values, Y* y, float* log_sums, bool has_earlier, u64 num) {
    int lane = threadIdx.x % WARP;
    FOR_EACH_WARP_ITEM(item, num) {
        Query query = query_at(at, item);
        u64 kv_head = query.head / (at.num_heads / at.num_kv_heads);
        const T* own = queries + row_of(at, query) * at.query_stride + query.head * at.head_dim;
        u64 first_row = query.sequence * at.rows_per_sequence;
        const T* of_keys = keys + first_row * at.key_stride + kv_head * at.head_dim;
        const T* of_values = values + first_row * at.value_stride + kv_head * at.value_dim;
        Y* out = y + (row_of(at, query) * at.num_heads + query.head) * at.value_dim;
        float* saved = log_sums + statistics_of(at, query);
        float largest = -INFINITY, sum = 0.0f, sums[COLUMNS] = {};
        if (has_earlier && *saved > -INFINITY) {
            // The earlier result counts as one key with the score `log_sum` and the earlier output as its value.
            largest = *saved;
            sum = 1.0f;
            add_row(sums, 1.0f, out, at.value_dim);
        }
        for (u64 first = 0; first < at.num_keys && !is_past(at, query, first); first += WARP) {
            u64 key = first + lane;
            bool is_seen = key < at.num_keys && is_visible(at, query, key);
            if (!__any_sync(ALL_LANES, is_seen)) {
                continue;
            }
            float score = is_seen ? score_of(at, dot(own, of_keys + key * at.key_stride, at.head_dim)).value : -INFINITY;
            float next = Max<float>::combine(largest, warp_reduce<Max>(score));
            float factor = largest > -INFINITY ? expf(largest - next) : 0.0f;
            float weight = is_seen ? expf(score - next) : 0.0f;
            sum = sum * factor + warp_reduce<Sum>(weight);
            for (int column = 0; column < COLUMNS; ++column) {
                sums[column] *= factor;
            }
            for (u64 other = first; other < first + WARP && other < at.num_keys; ++other) {
                float of_key = __shfl_sync(ALL_LANES, weight, int(other - first));
                if (of_key != 0.0f) {
                    add_row(sums, of_key, of_values + other * at.value_stride, at.value_dim);
                }
            }
            largest = next;
        }
        float scale = sum > 0.0f ? 1.0f / sum : sum;
        for (int column = 0; column < COLUMNS; ++column) {
            sums[column] *= scale;
        }
        write_row(sums, out, at.value_dim, false);
        if (lane == 0) {
            *saved = largest + logf(sum);
        }
    }
}

// For each query, the sum of the products of its output and the output's gradient.
template <class T> __device__ void attention_deltas(const Attention& at, const T* y, const T* dy, float* deltas, u64 num) {
    FOR_EACH_ELEMENT(item, num) {
        Query query = query_at(at, item);
        u64 start = (row_of(at, query) * at.num_heads + query.head) * at.value_dim;
        deltas[item] = dot(y + start, dy + start, at.value_dim);
    }
}

// The weight of a key for a query, and the gradient of the product of the two.
struct Pair {
    float weight, d_product;
};

template <class T>
__device__ inline Pair pair_of(
    const Attention& at, Query query, u64 key, const T* own, const T* of_key, const T* of_value, const T* dy,
    const float* log_sums, const float* deltas) {
    if (!is_visible(at, query, key)) {
        return {0.0f, 0.0f};
    }
    u64 place = statistics_of(at, query);
    Score score = score_of(at, dot(own, of_key, at.head_dim));
    float weight = expf(score.value - log_sums[place]);
    float d_weight = dot(dy, of_value, at.value_dim);
    return {weight, weight * (d_weight - deltas[place]) * score.slope};
}

template <class T, class G>
__device__ void attention_backward_queries(
    const Attention& at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums,
    const float* deltas, G* d_queries, bool accumulate, u64 num) {
    int lane = threadIdx.x % WARP;
    FOR_EACH_WARP_ITEM(item, num) {
        Query query = query_at(at, item);
        u64 kv_head = query.head / (at.num_heads / at.num_kv_heads), first_row = query.sequence * at.rows_per_sequence;
        u64 own = row_of(at, query) * at.query_stride + query.head * at.head_dim;
        const T* of_keys = keys + first_row * at.key_stride + kv_head * at.head_dim;
        const T* of_values = values + first_row * at.value_stride + kv_head * at.value_dim;
        const T* of_dy = dy + (row_of(at, query) * at.num_heads + query.head) * at.value_dim;
        float sums[COLUMNS] = {};
        for (u64 first = 0; first < at.num_keys && !is_past(at, query, first); first += WARP) {
            u64 key = first + lane;
            Pair pair = {0.0f, 0.0f};
            if (key < at.num_keys) {
                pair = pair_of(
                    at, query, key, queries + own, of_keys + key * at.key_stride, of_values + key * at.value_stride, of_dy,
                    log_sums, deltas);
            }
            for (u64 other = first; other < first + WARP && other < at.num_keys; ++other) {
                float d_product = __shfl_sync(ALL_LANES, pair.d_product, int(other - first));
                if (d_product != 0.0f) {
                    add_row(sums, d_product, of_keys + other * at.key_stride, at.head_dim);
                }
            }
        }
        write_row(sums, d_queries + own, at.head_dim, accumulate);
    }
}

template <class T, class G>
__device__ void attention_backward_keys(
    const Attention& at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums,
    const float* deltas, G* d_keys, G* d_values, bool accumulate, u64 num) {
    int lane = threadIdx.x % WARP;
    u64 heads_per_kv_head = at.num_heads / at.num_kv_heads;
    FOR_EACH_WARP_ITEM(item, num) {
        u64 key = item % at.num_keys, kv_head = item / at.num_keys % at.num_kv_heads;
        u64 sequence = item / at.num_keys / at.num_kv_heads, row = sequence * at.rows_per_sequence + key;
        u64 key_start = row * at.key_stride + kv_head * at.head_dim, value_start = row * at.value_stride + kv_head * at.value_dim;
        float key_sums[COLUMNS] = {}, value_sums[COLUMNS] = {};
        for (u64 head = kv_head * heads_per_kv_head; head < (kv_head + 1) * heads_per_kv_head; ++head) {
            for (u64 first = 0; first < at.seq_len; first += WARP) {
                auto query_start = [&](u64 index) {
                    return (sequence * at.seq_len + index) * at.query_stride + head * at.head_dim;
                };
                auto output_start = [&](u64 index) {
                    return ((sequence * at.seq_len + index) * at.num_heads + head) * at.value_dim;
                };
                u64 index = first + lane;
                Pair pair = {0.0f, 0.0f};
                if (index < at.seq_len) {
                    pair = pair_of(
                        at, {sequence, head, index}, key, queries + query_start(index), keys + key_start, values + value_start,
                        dy + output_start(index), log_sums, deltas);
                }
                for (u64 other = first; other < first + WARP && other < at.seq_len; ++other) {
                    float weight = __shfl_sync(ALL_LANES, pair.weight, int(other - first));
                    float d_product = __shfl_sync(ALL_LANES, pair.d_product, int(other - first));
                    if (weight != 0.0f) {
                        add_row(key_sums, d_product, queries + query_start(other), at.head_dim);
                        add_row(value_sums, weight, dy + output_start(other), at.value_dim);
                    }
                }
            }
        }
        write_row(key_sums, d_keys + key_start, at.head_dim, accumulate);
        write_row(value_sums, d_values + value_start, at.value_dim, accumulate);
    }
}

#define ATTENTION(T, Y)                                                                \
    extern "C" __global__ void attention_##T##_##Y(                                    \
        Attention at, const T* queries, const T* keys, const T* values, Y* y, float* log_sums, bool has_earlier, u64 num) { \
        attention<T, Y>(at, queries, keys, values, y, log_sums, has_earlier, num);     \
    }                                                                                  \
    extern "C" __global__ void attention_backward_queries_##T##_##Y(                   \
        Attention at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums, \
        const float* deltas, Y* d_queries, bool accumulate, u64 num) {                 \
        attention_backward_queries<T, Y>(                                              \
            at, queries, keys, values, dy, log_sums, deltas, d_queries, accumulate, num); \
    }                                                                                  \
    extern "C" __global__ void attention_backward_keys_##T##_##Y(                      \
        Attention at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums, \
        const float* deltas, Y* d_keys, Y* d_values, bool accumulate, u64 num) {       \
        attention_backward_keys<T, Y>(                                                 \
            at, queries, keys, values, dy, log_sums, deltas, d_keys, d_values, accumulate, num); \
    }
ATTENTION(f32, f32)
ATTENTION(bf16, bf16)
ATTENTION(bf16, f32)
ATTENTION(f16, f16)
ATTENTION(f16, f32)

#define OTHERS(T)                                                                      \
    extern "C" __global__ void attention_deltas_##T(Attention at, const T* y, const T* dy, float* deltas, u64 num) { \
        attention_deltas(at, y, dy, deltas, num);                                      \
    }                                                                                  \
    /* A thread per pair of elements that are rotated together, of the first `num_heads` heads of a row. */ \
    extern "C" __global__ void rotary_##T(                                             \
        T* qkv, u64 cols, u64 num_heads, u64 head_dim, u64 seq_len, const float* cos, const float* sin, Positions positions, \
        float direction, u64 num) {                                                    \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 half = head_dim / 2, column = i % half, head = i / half % num_heads, row = i / half / num_heads; \
            T* first = qkv + (row * cols + head * head_dim + column);                  \
            u64 angle = position_at(positions, row % seq_len) * half + column;         \
            float x = to_f32(first[0]), y = to_f32(first[half]), s = sin[angle] * direction, c = cos[angle]; \
            first[0] = from_f32<T>(x * c - y * s);                                     \
            first[half] = from_f32<T>(y * c + x * s);                                  \
        }                                                                              \
    }
FOR_EACH_FLOAT(OTHERS)

// As `LatentHeadShape` in Rust, with the length of sequences.
struct LatentHeads {
    u64 num_heads, nope_dim, rotary_dim, value_dim, is_interleaved, seq_len;
};

__device__ inline u64 place_of(const LatentHeads& at, u64 pair, bool is_second) {
    return at.is_interleaved ? 2 * pair + is_second : pair + (is_second ? at.rotary_dim / 2 : 0);
}

// One element of a pair that is rotated, or rotated back.
__device__ inline float rotated(float x, float y, float cos, float sin, bool is_second) {
    return is_second ? y * cos + x * sin : x * cos - y * sin;
}

#define LATENT(T)                                                                      \
    extern "C" __global__ void latent_heads_##T(                                       \
        LatentHeads at, const T* queries, const T* keys_values, const T* shared_key, const float* cos, const float* sin, \
        Positions positions, T* qkv, u64 cols, u64 num) {                              \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 row = i / cols, col = i % cols, dim = at.nope_dim + at.rotary_dim, query_cols = at.num_heads * dim; \
            u64 half = at.rotary_dim / 2, kv_dim = at.nope_dim + at.value_dim;         \
            const T* kv = keys_values + row * at.num_heads * kv_dim;                   \
            if (col >= 2 * query_cols) {                                               \
                u64 place = col - 2 * query_cols;                                      \
                qkv[i] = kv[place / at.value_dim * kv_dim + at.nope_dim + place % at.value_dim]; \
                continue;                                                              \
            }                                                                          \
            bool is_key = col >= query_cols;                                           \
            u64 head = col % query_cols / dim, place = col % dim;                      \
            const T* query = queries + (row * query_cols + head * dim);                \
            if (place < at.nope_dim) {                                                 \
                qkv[i] = is_key ? kv[head * kv_dim + place] : query[place];            \
                continue;                                                              \
            }                                                                          \
            u64 own = place - at.nope_dim, pair = own % half;                          \
            const T* pairs = is_key ? shared_key + row * at.rotary_dim : query + at.nope_dim; \
            float x = to_f32(pairs[place_of(at, pair, false)]), y = to_f32(pairs[place_of(at, pair, true)]); \
            u64 angle = position_at(positions, row % at.seq_len) * half + pair;        \
            qkv[i] = from_f32<T>(rotated(x, y, cos[angle], sin[angle], own >= half));  \
        }                                                                              \
    }                                                                                  \
    /* A thread per element of a row of the gradients of queries, of keys and values, and of the shared key. */ \
    extern "C" __global__ void latent_heads_backward_##T(                              \
        LatentHeads at, const T* grad, const float* cos, const float* sin, Positions positions, T* d_queries, \
        T* d_keys_values, T* d_shared_key, u64 cols, u64 num) {                        \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 row = i / cols, col = i % cols, dim = at.nope_dim + at.rotary_dim, query_cols = at.num_heads * dim; \
            u64 half = at.rotary_dim / 2, kv_dim = at.nope_dim + at.value_dim, kv_cols = at.num_heads * kv_dim; \
            const T* of = grad + row * (2 * query_cols + at.num_heads * at.value_dim); \
            if (col >= query_cols && col < query_cols + kv_cols) {                     \
                u64 own = col - query_cols, head = own / kv_dim, place = own % kv_dim; \
                const T* key = of + query_cols + head * dim;                           \
                const T* value = of + 2 * query_cols + head * at.value_dim;            \
                d_keys_values[row * kv_cols + own] = place < at.nope_dim ? key[place] : value[place - at.nope_dim]; \
                continue;                                                              \
            }                                                                          \
            bool is_query = col < query_cols;                                          \
            u64 place = is_query ? col % dim : at.nope_dim + (col - query_cols - kv_cols); \
            if (place < at.nope_dim) {                                                 \
                d_queries[row * query_cols + col] = of[col];                           \
                continue;                                                              \
            }                                                                          \
            u64 own = place - at.nope_dim;                                             \
            u64 pair = at.is_interleaved ? own / 2 : own % half;                       \
            bool is_second = at.is_interleaved ? own % 2 : own >= half;                \
            float x = 0.0f, y = 0.0f;                                                  \
            if (is_query) {                                                            \
                const T* query = of + (col - place + at.nope_dim);                     \
                x = to_f32(query[pair]);                                               \
                y = to_f32(query[pair + half]);                                        \
            } else {                                                                   \
                for (u64 head = 0; head < at.num_heads; ++head) {                      \
                    const T* key = of + (query_cols + head * dim + at.nope_dim);       \
                    x += to_f32(key[pair]);                                            \
                    y += to_f32(key[pair + half]);                                     \
                }                                                                      \
            }                                                                          \
            u64 angle = position_at(positions, row % at.seq_len) * half + pair;        \
            T value = from_f32<T>(rotated(x, y, cos[angle], -sin[angle], is_second));  \
            (is_query ? d_queries + (row * query_cols + col) : d_shared_key + (row * at.rotary_dim + own))[0] = value; \
        }                                                                              \
    }
FOR_EACH_FLOAT(LATENT)

// Appends the keys and values of new positions to a cache with rows for `capacity` positions of each sequence.
extern "C" __global__ void append_to_cache(
    const float* qkv, u64 cols, u64 first_col, u64 seq_len, float* cache, u64 capacity, u64 len, u64 cache_cols, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        u64 row = i / cache_cols, col = i % cache_cols;
        u64 position = row / seq_len * capacity + len + row % seq_len;
        cache[position * cache_cols + col] = qkv[row * cols + first_col + col];
    }
}
