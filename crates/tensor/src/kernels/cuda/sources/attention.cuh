// Attention by tiles of queries and keys (Dao, "FlashAttention-2", 2023). Kernels are generated for a pair of dims, which these are rounded
// up to; `instance` in `run/attention.rs`.
//
// The heads that share a head of keys are computed together: their queries are the rows of one matrix, all heads of the first query, then
// those of the second. A warp has 16 rows of a matrix, and the block reads the rows of the other one tile by tile. The positions of
// keys ascend, so a query sees one contiguous range of keys.
#pragma once

#include "mma.cuh"

// Sizes, mask and layout; `Sizes` in `run/attention.rs`. Strides are in elements. `window` is 0 for none, `soft_cap` 0 for none.
struct Attention {
    u64 batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim, num_keys;
    // Distance of rows of queries, keys and values, and the number of rows of keys and values of a sequence.
    u64 query_stride, key_stride, value_stride, rows_per_sequence;
    u64 is_causal, window;
    Positions queries, keys;
    const u32* padding_starts;
    const u32* document_starts;
    u64 is_aligned;
    float scale, soft_cap;
};

// Rows of a block; `BLOCK_ROWS` in `run/attention.rs`.
constexpr int BLOCK_ROWS = BLOCK / WARP * MMA_ROWS;
static_assert(BLOCK_ROWS == 128, "as in `run/attention.rs`");

// Rows of the tiles that a block reads, which static shared memory has room for.
template <class T, int DIMS> constexpr int TILE_ROWS = sizeof(T) == 4 || DIMS > 320 ? 16 : 64;

// Columns of scores that backward computes at a time: as many as are terms of a product in every dtype.
constexpr int STEP = 16;

// Keys, by their index.
struct KeyRange {
    u32 first, end;
};

// Returns the number of positions below a limit.
__device__ inline u32 num_below(Positions positions, u64 limit) {
    u64 in_first = limit > positions.first ? min(limit - positions.first, positions.first_len) : 0;
    u64 in_second = limit > positions.second ? min(limit - positions.second, positions.len - positions.first_len) : 0;
    return u32(in_first + in_second);
}

// The heads of a sequence that share a head of keys.
struct Group {
    const Attention& at;
    u64 sequence, kv_head;
    u32 num_heads, num_rows;

    __device__ Group(const Attention& at, u64 index)
        : at(at), sequence(index / at.num_kv_heads), kv_head(index % at.num_kv_heads),
          num_heads(u32(at.num_heads / at.num_kv_heads)), num_rows(u32(at.seq_len) * num_heads) {}

    __device__ u64 query_of(u32 row) const {
        return sequence * at.seq_len + row / num_heads;
    }

    __device__ u64 head_of(u32 row) const {
        return kv_head * num_heads + row % num_heads;
    }

    // The place of a row in queries, in outputs, and in their statistics.
    __device__ u64 query_start(u32 row) const {
        return query_of(row) * at.query_stride + head_of(row) * at.head_dim;
    }

    __device__ u64 output_start(u32 row) const {
        return (query_of(row) * at.num_heads + head_of(row)) * at.value_dim;
    }

    __device__ u64 statistics(u32 row) const {
        return (sequence * at.num_heads + head_of(row)) * at.seq_len + row / num_heads;
    }

    __device__ u64 key_start(u32 key) const {
        return (sequence * at.rows_per_sequence + key) * at.key_stride + kv_head * at.head_dim;
    }

    __device__ u64 value_start(u32 key) const {
        return (sequence * at.rows_per_sequence + key) * at.value_stride + kv_head * at.value_dim;
    }

    // The rows of a lane, of which `first` is one and the other is 8 rows behind it.
    __device__ LaneRows queries_of(u32 first) const {
        return {{query_start(first), query_start(first + 8)}, {first < num_rows, first + 8 < num_rows}};
    }

    __device__ LaneRows outputs_of(u32 first) const {
        return {{output_start(first), output_start(first + 8)}, {first < num_rows, first + 8 < num_rows}};
    }

    __device__ LaneRows keys_of(u32 first) const {
        return {{key_start(first), key_start(first + 8)}, {first < at.num_keys, first + 8 < at.num_keys}};
    }

    __device__ LaneRows values_of(u32 first) const {
        return {{value_start(first), value_start(first + 8)}, {first < at.num_keys, first + 8 < at.num_keys}};
    }

    // The keys that a row sees: none for rows beyond the last.
    __device__ KeyRange visible(u32 row) const {
        if (row >= num_rows) {
            return {0, 0};
        }
        u64 first = 0, end = ~0ull;
        if (at.is_causal) {
            u64 own = position_at(at.queries, row / num_heads);
            end = own + 1;
            first = at.window != 0 && own >= at.window ? own - at.window + 1 : 0;
            if (at.document_starts) {
                first = max(first, u64(at.document_starts[query_of(row)]));
            }
        }
        if (at.padding_starts) {
            end = min(end, u64(at.padding_starts[sequence]));
        }
        return {num_below(at.keys, first), num_below(at.keys, end)};
    }
};

// The group and the first row of a block's item. Items with the most work under a causal mask are first: the last queries, and the first
// keys.
struct Item {
    u64 group, first_row;

    __device__ static Item of_queries(const Attention& at, u64 item, u64 num) {
        return of_keys(at, num - 1 - item);
    }

    __device__ static Item of_keys(const Attention& at, u64 item) {
        u64 num_groups = at.batch * at.num_kv_heads;
        return {item % num_groups, item / num_groups * BLOCK_ROWS};
    }
};

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

// Combines the values of the four lanes that share a row. All of them get the result.
template <template <class> class Operation> __device__ inline float row_reduce(float value) {
    value = Operation<float>::combine(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return Operation<float>::combine(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

// The first of the two rows of a matrix that a lane has, for a block's rows from `first` on. The other is 8 rows behind it.
__device__ inline u32 lane_row(u64 first) {
    return u32(first) + threadIdx.x / WARP * MMA_ROWS + mma_row(0);
}

// Whether the warp has no row before the end.
__device__ inline bool is_idle(u64 first, u32 num_rows) {
    return first + threadIdx.x / WARP * MMA_ROWS >= num_rows;
}

// Calls `visit(row, col, value)` for each of a lane's sums, with the index of the row, 0 or 1.
template <int N, class S, class Visit> __device__ inline void for_each_sum(S (&sums)[N], Visit visit) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int element = 0; element < 4; ++element) {
            visit(element / 2, i * MMA_COLS + mma_col(element), sums[i].values[element]);
        }
    }
}

// Calls `visit(row, col, left, right)` for two matrices of the same shape.
template <int N, class Visit> __device__ inline void for_each_pair(Accumulator (&left)[N], Accumulator (&right)[N], Visit visit) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int element = 0; element < 4; ++element) {
            visit(element / 2, i * MMA_COLS + mma_col(element), left[i].values[element], right[i].values[element]);
        }
    }
}

// Writes sums to rows of `len` elements.
template <class Y, int N>
__device__ inline void write_rows(const Accumulator (&sums)[N], Y* array, const LaneRows& rows, u64 len, bool accumulate) {
    for_each_sum(sums, [&](int row, int col, float sum) {
        if (rows.exists[row] && col < len) {
            Y* to = array + rows.starts[row] + col;
            *to = from_f32<Y>(accumulate ? to_f32(*to) + sum : sum);
        }
    });
}

// Returns the smallest range that has the ranges of all threads of the block.
__device__ inline KeyRange union_of_block(const KeyRange (&ranges)[2]) {
    u32 first = ~0u, end = 0;
    for (KeyRange range : ranges) {
        if (range.first < range.end) {
            first = min(first, range.first);
            end = max(end, range.end);
        }
    }
    return {~block_max(~first), block_max(end)};
}

// Copies keys and values from `first` on to shared memory.
template <int KEYS, int DIM, int VALUE_DIM, class T>
__device__ inline void load_keys(const Group& group, const T* keys, const T* values, u32 first, T* key_tile, T* value_tile) {
    const Attention& at = group.at;
    load_tile<KEYS, DIM>(key_tile, at.head_dim, at.is_aligned, [&](u32 key) {
        return first + key < at.num_keys ? keys + group.key_start(first + key) : nullptr;
    });
    load_tile<KEYS, VALUE_DIM>(value_tile, at.value_dim, at.is_aligned, [&](u32 key) {
        return first + key < at.num_keys ? values + group.value_start(first + key) : nullptr;
    });
}

// Replaces the product of a query and a key by the key's weight, and the gradient of the weight by the one of the product.
__device__ inline void backward_of_pair(const Attention& at, bool is_seen, float log_sum, float delta, float& score, float& grad) {
    Score own = score_of(at, score);
    score = is_seen ? expf(own.value - log_sum) : 0.0f;
    grad = is_seen ? score * (grad - delta) * own.slope : 0.0f;
}

// `has_earlier` says whether `y` and `log_sums` hold the results for earlier keys, which the results are merged into.
template <class T, class Y, int DIM, int VALUE_DIM>
__device__ void attention(
    const Attention& at, const T* queries, const T* keys, const T* values, Y* y, float* log_sums, bool has_earlier, u64 num) {
    constexpr int KEYS = TILE_ROWS<T, DIM + VALUE_DIM>;
    __shared__ __align__(16) T key_tile[KEYS * TILE_STRIDE<T, DIM>];
    __shared__ __align__(16) T value_tile[KEYS * TILE_STRIDE<T, VALUE_DIM>];
    FOR_EACH_ROW(index, num) {
        Item item = Item::of_queries(at, index, num);
        Group group(at, item.group);
        u32 rows[2] = {lane_row(item.first_row), lane_row(item.first_row) + 8};
        KeyRange ranges[2] = {group.visible(rows[0]), group.visible(rows[1])};
        LaneRows outputs = group.outputs_of(rows[0]);
        GlobalRows<T, DIM> own(queries, group.queries_of(rows[0]), at.head_dim, at.is_aligned);
        float largest[2] = {-INFINITY, -INFINITY}, weights[2] = {};
        Accumulator sums[VALUE_DIM / MMA_COLS] = {};
        // The earlier result counts as one key with the score `log_sum` and the earlier output as its value.
        if (has_earlier) {
            for (int i = 0; i < 2; ++i) {
                if (outputs.exists[i]) {
                    largest[i] = log_sums[group.statistics(rows[i])];
                    weights[i] = largest[i] != -INFINITY && mma_col(0) == 0 ? 1.0f : 0.0f;
                }
            }
            for_each_sum(sums, [&](int row, int col, float& sum) {
                if (largest[row] != -INFINITY && col < at.value_dim) {
                    sum = to_f32(y[outputs.starts[row] + col]);
                }
            });
        }
        KeyRange seen = union_of_block(ranges);
        for (u32 first = seen.first / KEYS * KEYS; first < seen.end; first += KEYS) {
            __syncthreads();
            load_keys<KEYS, DIM, VALUE_DIM>(group, keys, values, first, key_tile, value_tile);
            __syncthreads();
            if (is_idle(item.first_row, group.num_rows)) {
                continue;
            }
            Accumulator scores[KEYS / MMA_COLS] = {};
            add_products(scores, own, key_tile, 0);
            float next[2] = {largest[0], largest[1]};
            for_each_sum(scores, [&](int row, int col, float& score) {
                bool is_seen = first + col >= ranges[row].first && first + col < ranges[row].end;
                score = is_seen ? score_of(at, score).value : -INFINITY;
                next[row] = Max<float>::combine(next[row], score);
            });
            float factors[2], bases[2];
            for (int i = 0; i < 2; ++i) {
                next[i] = row_reduce<Max>(next[i]);
                // While a row has seen no key, all its scores are -inf.
                bases[i] = next[i] > -INFINITY ? next[i] : 0.0f;
                factors[i] = expf(largest[i] - bases[i]);
                largest[i] = next[i];
                weights[i] *= factors[i];
            }
            for_each_sum(scores, [&](int row, int, float& score) {
                score = expf(score - bases[row]);
                weights[row] += score;
            });
            for_each_sum(sums, [&](int row, int, float& sum) { sum *= factors[row]; });
            add_weighted_rows(sums, scores, value_tile, 0);
        }
        for (int i = 0; i < 2; ++i) {
            float sum = row_reduce<Sum>(weights[i]);
            weights[i] = sum > 0.0f ? 1.0f / sum : sum;
            if (outputs.exists[i] && mma_col(0) == 0) {
                log_sums[group.statistics(rows[i])] = largest[i] + logf(sum);
            }
        }
        for_each_sum(sums, [&](int row, int, float& sum) { sum *= weights[row]; });
        write_rows(sums, y, outputs, at.value_dim, false);
    }
}

// The gradient of queries. A block has their rows, as in `attention`.
template <class T, class G, int DIM, int VALUE_DIM>
__device__ void attention_backward_queries(
    const Attention& at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums,
    const float* deltas, G* d_queries, bool accumulate, u64 num) {
    constexpr int KEYS = TILE_ROWS<T, DIM + VALUE_DIM>;
    __shared__ __align__(16) T key_tile[KEYS * TILE_STRIDE<T, DIM>];
    __shared__ __align__(16) T value_tile[KEYS * TILE_STRIDE<T, VALUE_DIM>];
    FOR_EACH_ROW(index, num) {
        Item item = Item::of_queries(at, index, num);
        Group group(at, item.group);
        u32 rows[2] = {lane_row(item.first_row), lane_row(item.first_row) + 8};
        LaneRows own_queries = group.queries_of(rows[0]);
        GlobalRows<T, DIM> own(queries, own_queries, at.head_dim, at.is_aligned);
        GlobalRows<T, VALUE_DIM> own_dy(dy, group.outputs_of(rows[0]), at.value_dim, at.is_aligned);
        KeyRange ranges[2] = {group.visible(rows[0]), group.visible(rows[1])};
        float log_sum[2] = {}, delta[2] = {};
        for (int i = 0; i < 2; ++i) {
            if (own_queries.exists[i]) {
                log_sum[i] = log_sums[group.statistics(rows[i])];
                delta[i] = deltas[group.statistics(rows[i])];
            }
        }
        KeyRange seen = union_of_block(ranges);
        Accumulator sums[DIM / MMA_COLS] = {};
        for (u32 first = seen.first / KEYS * KEYS; first < seen.end; first += KEYS) {
            __syncthreads();
            load_keys<KEYS, DIM, VALUE_DIM>(group, keys, values, first, key_tile, value_tile);
            __syncthreads();
            if (is_idle(item.first_row, group.num_rows)) {
                continue;
            }
#pragma unroll 1
            for (int step = 0; step < KEYS; step += STEP) {
                Accumulator scores[STEP / MMA_COLS] = {}, grads[STEP / MMA_COLS] = {};
                add_products(scores, own, key_tile, step);
                add_products(grads, own_dy, value_tile, step);
                for_each_pair(scores, grads, [&](int row, int col, float& score, float& grad) {
                    u32 key = first + step + col;
                    bool is_seen = key >= ranges[row].first && key < ranges[row].end;
                    backward_of_pair(at, is_seen, log_sum[row], delta[row], score, grad);
                });
                add_weighted_rows(sums, grads, key_tile, step);
            }
        }
        write_rows(sums, d_queries, own_queries, at.head_dim, accumulate);
    }
}

// The gradients of keys, of values, or of both, whichever are not null. A block has rows of keys, and reads tiles of queries and of `dy`.
// Both have registers for their sums only if dims are small.
template <bool HAS_KEYS, bool HAS_VALUES, class T, class G, int DIM, int VALUE_DIM>
__device__ void attention_backward_keys_values(
    const Attention& at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums,
    const float* deltas, G* d_keys, G* d_values, bool accumulate, u64 num) {
    constexpr int ROWS = TILE_ROWS<T, DIM + VALUE_DIM>;
    __shared__ __align__(16) T query_tile[ROWS * TILE_STRIDE<T, DIM>];
    __shared__ __align__(16) T dy_tile[ROWS * TILE_STRIDE<T, VALUE_DIM>];
    __shared__ float row_log_sums[ROWS], row_deltas[ROWS];
    __shared__ KeyRange row_ranges[ROWS];
    FOR_EACH_ROW(index, num) {
        Item item = Item::of_keys(at, index);
        Group group(at, item.group);
        u32 num_keys = u32(at.num_keys), block_end = min(u32(item.first_row) + BLOCK_ROWS, num_keys);
        u32 own[2] = {lane_row(item.first_row), lane_row(item.first_row) + 8};
        LaneRows key_rows = group.keys_of(own[0]), value_rows = group.values_of(own[0]);
        constexpr bool IS_HELD = sizeof(T) == 2 && DIM + VALUE_DIM <= 192;
        GlobalRows<T, DIM, IS_HELD> own_keys(keys, key_rows, at.head_dim, at.is_aligned);
        GlobalRows<T, VALUE_DIM, IS_HELD> own_values(values, value_rows, at.value_dim, at.is_aligned);
        Accumulator key_sums[HAS_KEYS ? DIM / MMA_COLS : 2] = {}, value_sums[HAS_VALUES ? VALUE_DIM / MMA_COLS : 2] = {};
        for (u32 first = 0; first < group.num_rows; first += ROWS) {
            __syncthreads();
            bool is_any_seen = false;
            for (int i = threadIdx.x; i < ROWS; i += BLOCK) {
                u32 row = first + i;
                KeyRange range = group.visible(row);
                is_any_seen |= range.first < block_end && range.end > item.first_row && range.first < range.end;
                row_ranges[i] = range;
                row_log_sums[i] = row < group.num_rows ? log_sums[group.statistics(row)] : 0.0f;
                row_deltas[i] = row < group.num_rows ? deltas[group.statistics(row)] : 0.0f;
            }
            if (!block_any(is_any_seen)) {
                continue;
            }
            load_tile<ROWS, DIM>(query_tile, at.head_dim, at.is_aligned, [&](u32 row) {
                return first + row < group.num_rows ? queries + group.query_start(first + row) : nullptr;
            });
            load_tile<ROWS, VALUE_DIM>(dy_tile, at.value_dim, at.is_aligned, [&](u32 row) {
                return first + row < group.num_rows ? dy + group.output_start(first + row) : nullptr;
            });
            __syncthreads();
            if (is_idle(item.first_row, num_keys)) {
                continue;
            }
#pragma unroll 1
            for (int step = 0; step < ROWS; step += STEP) {
                Accumulator scores[STEP / MMA_COLS] = {}, grads[STEP / MMA_COLS] = {};
                add_products(scores, own_keys, query_tile, step);
                if constexpr (HAS_KEYS) {
                    add_products(grads, own_values, dy_tile, step);
                }
                for_each_pair(scores, grads, [&](int key, int row, float& score, float& grad) {
                    KeyRange range = row_ranges[step + row];
                    bool is_seen = own[key] >= range.first && own[key] < range.end;
                    backward_of_pair(at, is_seen, row_log_sums[step + row], row_deltas[step + row], score, grad);
                });
                if constexpr (HAS_VALUES) {
                    add_weighted_rows(value_sums, scores, dy_tile, step);
                }
                if constexpr (HAS_KEYS) {
                    add_weighted_rows(key_sums, grads, query_tile, step);
                }
            }
        }
        if constexpr (HAS_KEYS) {
            write_rows(key_sums, d_keys, key_rows, at.head_dim, accumulate);
        }
        if constexpr (HAS_VALUES) {
            write_rows(value_sums, d_values, value_rows, at.value_dim, accumulate);
        }
    }
}

#define ATTENTION(name, T, Y, DIM, VALUE_DIM)                                          \
    extern "C" __global__ void name(                                                   \
        Attention at, const T* queries, const T* keys, const T* values, Y* y, float* log_sums, bool has_earlier, u64 num) { \
        attention<T, Y, DIM, VALUE_DIM>(at, queries, keys, values, y, log_sums, has_earlier, num); \
    }

#define ATTENTION_BACKWARD_QUERIES(name, T, G, DIM, VALUE_DIM)                         \
    extern "C" __global__ void name(                                                   \
        Attention at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums, \
        const float* deltas, G* d_queries, bool accumulate, u64 num) {                 \
        attention_backward_queries<T, G, DIM, VALUE_DIM>(                              \
            at, queries, keys, values, dy, log_sums, deltas, d_queries, accumulate, num); \
    }

#define KEYS_VALUES(HAS_KEYS, HAS_VALUES, name, T, G, DIM, VALUE_DIM)                  \
    extern "C" __global__ void name(                                                   \
        Attention at, const T* queries, const T* keys, const T* values, const T* dy, const float* log_sums, \
        const float* deltas, G* d_keys, G* d_values, bool accumulate, u64 num) {       \
        attention_backward_keys_values<HAS_KEYS, HAS_VALUES, T, G, DIM, VALUE_DIM>(    \
            at, queries, keys, values, dy, log_sums, deltas, d_keys, d_values, accumulate, num); \
    }
#define ATTENTION_BACKWARD_KEYS_VALUES(...) KEYS_VALUES(true, true, __VA_ARGS__)
#define ATTENTION_BACKWARD_KEYS(...) KEYS_VALUES(true, false, __VA_ARGS__)
#define ATTENTION_BACKWARD_VALUES(...) KEYS_VALUES(false, true, __VA_ARGS__)
