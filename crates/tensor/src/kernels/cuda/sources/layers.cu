// Normalization, embedding and cross-entropy.

#include "common.cuh"

#define NORM(T)                                                                        \
    extern "C" __global__ void norm_##T(                                               \
        const float* x, const float* weight, const float* bias, float epsilon, bool is_centered, T* y, \
        float* statistics, u64 cols, u64 rows) {                                       \
        FOR_EACH_ROW(row, rows) {                                                      \
            const float* from = x + row * cols;                                        \
            float sum = 0.0f, squares = 0.0f, mean = 0.0f;                             \
            if (is_centered) {                                                         \
                for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                 \
                    sum += from[i];                                                    \
                }                                                                      \
                mean = block_sum(sum) / float(cols);                                   \
            }                                                                          \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                squares += (from[i] - mean) * (from[i] - mean);                        \
            }                                                                          \
            float scale = 1.0f / sqrtf(block_sum(squares) / float(cols) + epsilon);    \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                float value = (from[i] - mean) * scale * weight[i];                    \
                y[row * cols + i] = from_f32<T>(bias ? value + bias[i] : value);       \
            }                                                                          \
            if (threadIdx.x == 0) {                                                    \
                statistics[2 * row] = mean;                                            \
                statistics[2 * row + 1] = scale;                                       \
            }                                                                          \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void norm_backward_input_##T(                                \
        const float* x, const float* weight, const float* statistics, bool is_centered, const T* dy, float* dx, \
        bool accumulate, u64 cols, u64 rows) {                                         \
        FOR_EACH_ROW(row, rows) {                                                      \
            const float* from = x + row * cols;                                        \
            const T* grad = dy + row * cols;                                           \
            float mean = statistics[2 * row], scale = statistics[2 * row + 1];         \
            float products = 0.0f, sum = 0.0f;                                         \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                float weighted = to_f32(grad[i]) * weight[i];                          \
                products += weighted * (from[i] - mean);                               \
                sum += weighted;                                                       \
            }                                                                          \
            float projection = block_sum(products) * scale / float(cols);              \
            float mean_grad = is_centered ? block_sum(sum) / float(cols) : 0.0f;       \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                float normed = (from[i] - mean) * scale;                               \
                float value = scale * (to_f32(grad[i]) * weight[i] - mean_grad - normed * projection); \
                float* to = dx + (row * cols + i);                                     \
                *to = accumulate ? *to + value : value;                                \
            }                                                                          \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void norm_backward_weight_##T(                               \
        const float* x, const T* dy, const float* statistics, float* d_weight, bool accumulate, u64 rows, u64 cols) { \
        auto term = [&](u64 row, u64 col) {                                            \
            float mean = statistics[2 * row], scale = statistics[2 * row + 1];         \
            return to_f32(dy[row * cols + col]) * (x[row * cols + col] - mean) * scale; \
        };                                                                             \
        sum_columns(rows, cols, term, [&](u64 col, float sum) {                        \
            d_weight[col] = accumulate ? d_weight[col] + sum : sum;                    \
        });                                                                            \
    }
FOR_EACH_FLOAT(NORM)

#define EMBEDDING(T, P)                                                                \
    extern "C" __global__ void embedding_##T##_##P(                                    \
        const u32* ids, const T* table, u64 num_rows, const T* position_table, u64 num_positions, Positions positions, \
        float* out, u64 cols, u64 num) {                                               \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 row = i / cols, col = i % cols, id = ids[row];                         \
            check(id < num_rows);                                                      \
            float value = to_f32(from_f32<P>(to_f32(table[id * cols + col])));         \
            if (position_table) {                                                      \
                u64 position = position_at(positions, row % positions.len);            \
                check(position < num_positions);                                       \
                value += to_f32(from_f32<P>(to_f32(position_table[position * cols + col]))); \
            }                                                                          \
            out[i] = value;                                                            \
        }                                                                              \
    }
FOR_EACH_PAIR(EMBEDDING)

extern "C" __global__ void add_positions(
    const float* x, const float* table, u64 num_positions, u64 first_row, Positions positions, float* out, u64 cols, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        u64 position = position_at(positions, (first_row + i / cols) % positions.len);
        check(position < num_positions);
        out[i] = x[i] + table[position * cols + i % cols];
    }
}

// As `Bags` in `kernels/cpu/embedding.rs`. `shard_len` is the number of rows of the table that are stored, from `shard_start` on; ids of
// other rows add nothing if the table is sharded.
struct Bags {
    const u32* ids;
    const u32* lens;
    u64 bag_len, shard_start, shard_len;
    u32 is_mean, is_sharded;
};

__device__ inline u64 bag_size(const Bags& bags, u64 bag) {
    return bags.lens ? min(u64(bags.lens[bag]), bags.bag_len) : bags.bag_len;
}

__device__ inline float bag_factor(const Bags& bags, u64 bag) {
    return bags.is_mean ? 1.0f / float(max(bag_size(bags, bag), u64(1))) : 1.0f;
}

// Whether the id belongs to the shard. Stops the kernel if it belongs to no table.
__device__ inline bool is_stored(const Bags& bags, u64 id) {
    bool is_within = id >= bags.shard_start && id - bags.shard_start < bags.shard_len;
    check(is_within || bags.is_sharded);
    return is_within;
}

#define EMBEDDING_BAG(T, P)                                                            \
    extern "C" __global__ void embedding_bag_##T##_##P(Bags bags, const T* table, float* out, u64 cols, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 bag = i / cols, col = i % cols, size = bag_size(bags, bag);            \
            float sum = 0.0f;                                                          \
            for (u64 index = 0; index < size; ++index) {                               \
                u64 id = bags.ids[bag * bags.bag_len + index];                         \
                if (is_stored(bags, id)) {                                             \
                    sum += to_f32(from_f32<P>(to_f32(table[(id - bags.shard_start) * cols + col]))); \
                }                                                                      \
            }                                                                          \
            out[i] = sum * bag_factor(bags, bag);                                      \
        }                                                                              \
    }
FOR_EACH_PAIR(EMBEDDING_BAG)

// A block per id of a bag. The block of the first occurrence of an id adds the gradients of all its occurrences to the table, in order.
extern "C" __global__ void embedding_bag_backward(Bags bags, const float* dy, float* d_table, u64 cols, u64 num_ids) {
    __shared__ u32 matches[BLOCK];
    __shared__ u32 num_matches;
    FOR_EACH_ROW(own, num_ids) {
        u64 id = bags.ids[own];
        auto is_match = [&](u64 index) {
            return index < num_ids && bags.ids[index] == id && index % bags.bag_len < bag_size(bags, index / bags.bag_len);
        };
        bool is_later = !is_match(own);
        for (u64 index = threadIdx.x; index < own && !is_later; index += blockDim.x) {
            is_later = is_match(index);
        }
        if (block_any(is_later) || !is_stored(bags, id)) {
            continue;
        }
        float* to = d_table + (id - bags.shard_start) * cols;
        for (u64 first = own; first < num_ids; first += BLOCK) {
            // The warps list their matches one after the other.
            bool own_match = is_match(first + threadIdx.x);
            LaneMask votes = __ballot_sync(ALL_LANES, own_match);
            int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
            if (threadIdx.x == 0) {
                num_matches = 0;
            }
            __syncthreads();
            for (int turn = 0; turn < BLOCK / WARP; ++turn) {
                if (turn == warp) {
                    if (own_match) {
                        matches[num_matches + num_lanes(votes & ((LaneMask(1) << lane) - 1))] = threadIdx.x;
                    }
                    __syncwarp();
                    if (lane == 0) {
                        num_matches += num_lanes(votes);
                    }
                }
                __syncthreads();
            }
            for (u32 match = 0; match < num_matches; ++match) {
                u64 bag = (first + matches[match]) / bags.bag_len;
                float factor = bag_factor(bags, bag);
                for (u64 col = threadIdx.x; col < cols; col += blockDim.x) {
                    to[col] += factor * dy[bag * cols + col];
                }
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void position_backward(
    const float* dy, u64 num_sequences, Positions positions, float* d_positions, u64 cols, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        float* to = d_positions + (position_at(positions, i / cols) * cols + i % cols);
        float sum = *to;
        for (u64 sequence = 0; sequence < num_sequences; ++sequence) {
            sum += dy[sequence * num + i];
        }
        *to = sum;
    }
}

// As `VocabularyChunk` in `kernels/cpu/cross_entropy.rs`; `start` is that of the chunk within the full vocabulary.
struct Chunk {
    u64 start, len;
};

extern "C" __global__ void softmax_statistics(
    const float* logits, const u32* targets, Chunk chunk, bool is_first, float* statistics, u64 rows) {
    FOR_EACH_ROW(row, rows) {
        const float* of = logits + row * chunk.len;
        float* saved = statistics + 3 * row;
        float old_max = is_first ? FLOAT_MIN : saved[0], old_sum = is_first ? 0.0f : saved[1];
        float largest = old_max, sum = 0.0f;
        for (u64 i = threadIdx.x; i < chunk.len; i += blockDim.x) {
            largest = Max<float>::combine(largest, of[i]);
        }
        largest = block_max(largest);
        for (u64 i = threadIdx.x; i < chunk.len; i += blockDim.x) {
            sum += expf(of[i] - largest);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) {
            u64 target = targets[row];
            bool has_target = target >= chunk.start && target - chunk.start < chunk.len;
            saved[2] = has_target ? of[target - chunk.start] : is_first ? 0.0f : saved[2];
            saved[0] = largest;
            saved[1] = old_sum * expf(old_max - largest) + sum;
        }
        __syncthreads();
    }
}

extern "C" __global__ void merge_statistics(const float* parts, u64 num_parts, float* statistics, u64 rows) {
    FOR_EACH_ELEMENT(row, rows) {
        float largest = FLOAT_MIN, sum = 0.0f, target = 0.0f;
        for (u64 part = 0; part < num_parts; ++part) {
            largest = Max<float>::combine(largest, parts[3 * (part * rows + row)]);
        }
        for (u64 part = 0; part < num_parts; ++part) {
            const float* of = parts + 3 * (part * rows + row);
            sum += of[1] * expf(of[0] - largest);
            // The target's logit is 0 in all other parts.
            target += of[2];
        }
        float* to = statistics + 3 * row;
        to[0] = largest;
        to[1] = sum;
        to[2] = target;
    }
}

#define CROSS_ENTROPY(T)                                                               \
    extern "C" __global__ void cross_entropy_gradient_##T(                             \
        const float* logits, const u32* targets, Chunk chunk, const float* statistics, float scale, \
        const float* weights, T* gradient, u64 num) {                                  \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 row = i / chunk.len, column = i % chunk.len;                           \
            float weight = weights ? weights[row] : 1.0f;                              \
            float row_scale = weights ? scale * weight : scale;                        \
            float value = expf(logits[i] - statistics[3 * row]) * (row_scale / statistics[3 * row + 1]); \
            value = targets[row] == chunk.start + column ? value - row_scale : value;  \
            /* The gradient is 0 even if logits are not finite. */                     \
            gradient[i] = from_f32<T>(weight == 0.0f ? 0.0f : value);                  \
        }                                                                              \
    }
FOR_EACH_FLOAT(CROSS_ENTROPY)
