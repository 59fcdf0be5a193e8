// Rotary embeddings, latent heads, the cache of keys and values, and the first step of the backward of attention. The others are in
// `attention.cuh`.

#include "attention.cuh"

// A warp per query of a head: the sum of the products of its output and the output's gradient.
template <class T>
__device__ void attention_deltas(const T* y, const T* dy, u64 seq_len, u64 num_heads, u64 value_dim, float* deltas, u64 num) {
    FOR_EACH_WARP_ITEM(row, num) {
        float sum = 0.0f;
        for (u64 col = threadIdx.x % WARP; col < value_dim; col += WARP) {
            sum = fmaf(to_f32(y[row * value_dim + col]), to_f32(dy[row * value_dim + col]), sum);
        }
        sum = warp_reduce<Sum>(sum);
        if (threadIdx.x % WARP == 0) {
            u64 query = row / num_heads, head = row % num_heads;
            deltas[(query / seq_len * num_heads + head) * seq_len + query % seq_len] = sum;
        }
    }
}

#define OTHERS(T)                                                                      \
    extern "C" __global__ void attention_deltas_##T(                                   \
        const T* y, const T* dy, u64 seq_len, u64 num_heads, u64 value_dim, float* deltas, u64 num) { \
        attention_deltas(y, dy, seq_len, num_heads, value_dim, deltas, num);           \
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
