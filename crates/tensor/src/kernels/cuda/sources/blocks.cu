// Copies, permutations, gathers, sums over a dim, and softmax.

#include "common.cuh"

struct Four {
    u64 at[4];
};

#define COPIES(T)                                                                      \
    extern "C" __global__ void copy_blocks_##T(                                        \
        const T* x, u64 from, u64 from_stride, T* y, u64 to, u64 to_stride, u64 len, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 block = i / len, offset = i % len;                                     \
            y[to + block * to_stride + offset] = x[from + block * from_stride + offset]; \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void permute_##T(const T* x, Four strides, T* y, Four dims, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 rest = i, from = 0;                                                    \
            for (int dim = 3; dim >= 0; --dim) {                                       \
                from += rest % dims.at[dim] * strides.at[dim];                         \
                rest /= dims.at[dim];                                                  \
            }                                                                          \
            y[i] = x[from];                                                            \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void gather_rows_##T(                                        \
        const T* x, u64 num_rows, const u32* ids, T* y, u64 cols, u64 num) {           \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 id = ids[i / cols];                                                    \
            check(id < num_rows);                                                      \
            y[i] = x[id * cols + i % cols];                                            \
        }                                                                              \
    }
FOR_EACH_WORD(COPIES)

#define DIMS(T)                                                                        \
    /* A sum over the last dim: a block per row. */                                    \
    extern "C" __global__ void sum_last_dim_##T(const T* x, u64 dim, float factor, T* y, u64 rows) { \
        FOR_EACH_ROW(row, rows) {                                                      \
            float sum = 0.0f;                                                          \
            for (u64 i = threadIdx.x; i < dim; i += blockDim.x) {                      \
                sum += to_f32(x[row * dim + i]);                                       \
            }                                                                          \
            sum = block_sum(sum);                                                      \
            if (threadIdx.x == 0) {                                                    \
                y[row] = from_f32<T>(factor * sum);                                    \
            }                                                                          \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void sum_dim_##T(const T* x, u64 dim, u64 inner, float factor, T* y, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            const T* first = x + (i / inner * dim * inner + i % inner);                \
            float total = 0.0f;                                                        \
            for (u64 start = 0; start < dim; start += SUM_TERMS) {                     \
                float sum = 0.0f;                                                      \
                for (u64 d = start; d < dim && d < start + SUM_TERMS; ++d) {           \
                    sum += to_f32(first[d * inner]);                                   \
                }                                                                      \
                total += sum;                                                          \
            }                                                                          \
            y[i] = from_f32<T>(factor * total);                                        \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void broadcast_dim_##T(const T* x, u64 dim, u64 inner, float factor, T* y, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            y[i] = from_f32<T>(factor * to_f32(x[i / (dim * inner) * inner + i % inner])); \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void softmax_##T(const T* x, T* y, u64 cols, u64 rows) {     \
        FOR_EACH_ROW(row, rows) {                                                      \
            const T* from = x + row * cols;                                            \
            float largest = -INFINITY, sum = 0.0f;                                     \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                largest = Max<float>::combine(largest, to_f32(from[i]));               \
            }                                                                          \
            largest = block_max(largest);                                              \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                sum += expf(to_f32(from[i]) - largest);                                \
            }                                                                          \
            float scale = 1.0f / block_sum(sum);                                       \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                y[row * cols + i] = from_f32<T>(scale * expf(to_f32(from[i]) - largest)); \
            }                                                                          \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void softmax_backward_##T(const T* y, T* dy, u64 cols, u64 rows) { \
        FOR_EACH_ROW(row, rows) {                                                      \
            const T* of = y + row * cols;                                              \
            T* grad = dy + row * cols;                                                 \
            float sum = 0.0f;                                                          \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                sum += to_f32(of[i]) * to_f32(grad[i]);                                \
            }                                                                          \
            float mean = block_sum(sum);                                               \
            for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {                     \
                grad[i] = from_f32<T>(to_f32(of[i]) * (to_f32(grad[i]) - mean));       \
            }                                                                          \
        }                                                                              \
    }
FOR_EACH_FLOAT(DIMS)
