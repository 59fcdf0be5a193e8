// Sums that stay on the device, and counts of correct predictions.

#include "common.cuh"

#define COLUMN_SUMS(T)                                                                 \
    extern "C" __global__ void column_sums_##T(const T* x, float* out, bool accumulate, u64 rows, u64 cols) { \
        auto term = [&](u64 row, u64 col) { return to_f32(x[row * cols + col]); };     \
        sum_columns(rows, cols, term, [&](u64 col, float sum) {                        \
            out[col] = accumulate ? out[col] + sum : sum;                              \
        });                                                                            \
    }
FOR_EACH_FLOAT(COLUMN_SUMS)

// The windows of an exact sum (`kernels/cpu/exact_sum.rs`).
constexpr int WINDOWS = 8, WINDOW_BITS = 36;

__device__ inline double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}

__device__ inline double lowest_of_window(int window) {
    return power_of_two(WINDOW_BITS * window - 149);
}

__device__ inline void carry(double* windows) {
    for (int window = 1; window < WINDOWS; ++window) {
        double lowest = lowest_of_window(window);
        double carried = floor(windows[window - 1] / lowest) * lowest;
        windows[window - 1] -= carried;
        windows[window] += carried;
    }
}

// Number of squares that a thread adds before it carries.
constexpr int SQUARES_PER_CARRY = 1 << 16;

// Adds the windows of each block to `sum`. Each addition is exact, so that their order has no effect. `carry_sum` must follow.
extern "C" __global__ void add_squares(const float* x, double* sum, u64 num) {
    double windows[WINDOWS] = {};
    int num_added = 0;
    FOR_EACH_ELEMENT(i, num) {
        float square = fabsf(x[i] * x[i]);
        u32 bits = __float_as_uint(square);
        if (bits >= 0x7f800000) {
            windows[WINDOWS - 1] += double(square);
            continue;
        }
        int exponent = max(int(bits >> 23), 1);
        double rest = double(square);
        for (int window = (exponent + 22) / WINDOW_BITS; rest != 0.0; --window) {
            double rounder = 1.5 * power_of_two(52) * lowest_of_window(window);
            double part = (rest + rounder) - rounder;
            windows[window] += part;
            rest -= part;
        }
        if (++num_added == SQUARES_PER_CARRY) {
            carry(windows);
            num_added = 0;
        }
    }
    carry(windows);
    for (int window = 0; window < WINDOWS; ++window) {
        windows[window] = block_sum(windows[window]);
    }
    if (threadIdx.x != 0) {
        return;
    }
    carry(windows);
    for (int window = 0; window < WINDOWS; ++window) {
        u64* address = reinterpret_cast<u64*>(sum + window);
        u64 old = *address, expected;
        do {
            expected = old;
            double added = __longlong_as_double(static_cast<long long>(old)) + windows[window];
            old = atomicCAS(address, expected, u64(__double_as_longlong(added)));
        } while (old != expected);
    }
}

extern "C" __global__ void carry_sum(double* sum) {
    if (threadIdx.x == 0) {
        carry(sum);
    }
}

// One block.
extern "C" __global__ void sum_elements(const float* x, double divisor, double* out, u64 num) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < num; i += blockDim.x) {
        sum += double(x[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *out = sum / divisor;
    }
}

// One block. `statistics` are the largest logit, the sum of exponentials, and the target's logit of each row.
extern "C" __global__ void sum_losses(const float* statistics, const float* weights, double* out, u64 rows) {
    double sum = 0.0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) {
        const float* of = statistics + 3 * row;
        float weight = weights ? weights[row] : 1.0f;
        if (weight != 0.0f) {
            sum += double((of[0] - of[2]) + logf(of[1])) * double(weight);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *out = sum;
    }
}

extern "C" __global__ void hits(const float* scores, const u32* classes, float* hits, u64 cols, u64 rows) {
    FOR_EACH_ROW(row, rows) {
        const float* of = scores + row * cols;
        u64 own_class = classes[row];
        bool is_beaten = own_class >= cols;
        float own = is_beaten ? 0.0f : of[own_class];
        for (u64 i = threadIdx.x; i < cols; i += blockDim.x) {
            is_beaten = is_beaten || !(i < own_class ? of[i] < own : of[i] <= own);
        }
        is_beaten = block_any(is_beaten);
        if (threadIdx.x == 0) {
            hits[row] = is_beaten ? 0.0f : 1.0f;
        }
    }
}

// `has_ratio` says whether the product is added to `out`.
extern "C" __global__ void add_term(const double* term, double weight, bool has_ratio, double ratio, double* out) {
    if (threadIdx.x == 0) {
        double product = weight * *term;
        *out = has_ratio ? *out + product * ratio : product;
    }
}
