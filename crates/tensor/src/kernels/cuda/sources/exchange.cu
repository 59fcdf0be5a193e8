// Reductions of vectors that ranks have exchanged.

#include "common.cuh"

// As `kernels/cuda/nccl/mod.rs` numbers reductions.
enum Reduction { SUM, PRODUCT, MAX, MIN };

// NaN takes precedence. Of equal values, the right one is taken, as on the CPU.
__device__ inline float reduced(u32 reduction, float left, float right) {
    switch (reduction) {
    case SUM:
        return left + right;
    case PRODUCT:
        return left * right;
    case MAX:
        return left > right || left != left ? left : right;
    default:
        return left < right || left != left ? left : right;
    }
}

#define COMBINE(T)                                                                     \
    extern "C" __global__ void combine_##T(u32 reduction, const T* left, const T* right, T* out, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            out[i] = from_f32<T>(reduced(reduction, to_f32(left[i]), to_f32(right[i]))); \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void divide_##T(T* sums, float divisor, u64 num) {           \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            sums[i] = from_f32<T>(to_f32(sums[i]) / divisor);                          \
        }                                                                              \
    }
FOR_EACH_FLOAT(COMBINE)
