// Types and functions that all kernels share.
//
// The sources keep to a dialect that NVRTC and, for tests, a C++ compiler for the host accept: no headers of CUDA, and no extensions but
// those below. Kernels are `extern "C"`; their names end in the dtypes of their arrays, as in `convert_f32_bf16`.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC_RTC__
#define DYNAMIC_SHARED(type, name)                                                     \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];              \
    type* name = reinterpret_cast<type*>(dynamic_shared_bytes)
#define INFINITY __int_as_float(0x7f800000)
#endif

// Number of threads of a warp, and its lanes as bits. All lanes take part in the operations below. HIP's masks have 64 bits for any warp.
#ifdef __HIP_PLATFORM_AMD__
#ifdef __GFX9__
constexpr int WARP = 64;
#else
constexpr int WARP = 32;
#endif
using LaneMask = u64;
#else
constexpr int WARP = 32;
using LaneMask = u32;
#endif
constexpr LaneMask ALL_LANES = LaneMask(~0ull);

__device__ inline int num_lanes(LaneMask lanes) {
    return __popcll(lanes);
}

// Number of threads of a block.
constexpr int BLOCK = 256;

constexpr float FLOAT_MIN = -3.402823466e38f;

struct Bf16 {
    u16 bits;
};

struct F16 {
    u16 bits;
};

using f32 = float;
using bf16 = Bf16;
using f16 = F16;

__device__ inline float to_f32(float value) {
    return value;
}

__device__ inline float to_f32(Bf16 value) {
    return __uint_as_float(u32(value.bits) << 16);
}

__device__ inline float to_f32(F16 value) {
    u32 sign = u32(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest >= 0x7c00) {
        return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    }
    // Exact: the exponent is corrected by a product with a power of two, also for subnormal values.
    float magnitude = __uint_as_float(rest << 13) * 5.192296858534828e33f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

template <class T> __device__ T from_f32(float value);

template <> __device__ inline float from_f32<float>(float value) {
    return value;
}

// Rounds to nearest even. NaN stays NaN.
template <> __device__ inline Bf16 from_f32<Bf16>(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return {u16(bits >> 16 | 0x40)};
    }
    return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Rounds to nearest even. NaN stays NaN.
template <> __device__ inline F16 from_f32<F16>(float value) {
    u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return {u16(sign | 0x7e00 | (magnitude >> 13 & 0x1ff))};
    }
    if (magnitude >= 0x477ff000) {
        return {u16(sign | 0x7c00)};
    }
    if (magnitude < 0x38800000) {
        // Subnormal: adding 0.5 aligns the last bit of the result with the last bit of the sum, which is rounded to nearest even.
        float aligned = __uint_as_float(magnitude) + 0.5f;
        return {u16(sign | (__float_as_uint(aligned) - 0x3f000000))};
    }
    u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {u16(sign | (rounded - 0x38000000) >> 13)};
}

// Calls M(type) for each float dtype that kernels compute with.
#define FOR_EACH_FLOAT(M) M(f32) M(bf16) M(f16)

// Calls M(type) for the unsigned integer of each size of elements, for kernels that only copy.
#define FOR_EACH_WORD(M) M(u8) M(u16) M(u32)

// Calls M(first, second) for each pair of float dtypes.
#define FOR_EACH_PAIR(M)                                                               \
    M(f32, f32) M(f32, bf16) M(f32, f16) M(bf16, f32) M(bf16, bf16) M(bf16, f16) M(f16, f32) M(f16, bf16) M(f16, f16)

// As `trireme_base::Positions`.
struct Positions {
    u64 first, first_len, second, len;
};

__device__ inline u64 position_at(Positions positions, u64 index) {
    return index < positions.first_len ? positions.first + index : positions.second + (index - positions.first_len);
}

// Index of the first element of this thread, and the distance to its next one.
__device__ inline u64 first_element() {
    return u64(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ inline u64 element_stride() {
    return u64(gridDim.x) * blockDim.x;
}

#define FOR_EACH_ELEMENT(index, num) for (u64 index = first_element(); index < (num); index += element_stride())

// A block per row.
#define FOR_EACH_ROW(row, num) for (u64 row = blockIdx.x; row < (num); row += gridDim.x)

// A warp per item.
#define FOR_EACH_WARP_ITEM(item, num)                                                  \
    for (u64 item = first_element() / WARP; item < (num); item += element_stride() / WARP)

template <class T> struct Sum {
    __device__ static T identity() {
        return T(0);
    }
    __device__ static T combine(T left, T right) {
        return left + right;
    }
};

// The maximum, which ignores NaN.
template <class T> struct Max {
    __device__ static T identity() {
        return T(-INFINITY);
    }
    __device__ static T combine(T left, T right) {
        return right > left ? right : left;
    }
};

template <> __device__ inline u32 Max<u32>::identity() {
    return 0;
}

// Combines a value of each lane, in a fixed tree. All lanes get the result.
template <template <class> class Operation, class T> __device__ inline T warp_reduce(T value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = Operation<T>::combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// Combines a value of each thread of the block, in a fixed tree. All threads get the result. The number of threads is a multiple of a warp.
template <template <class> class Operation, class T> __device__ inline T block_reduce(T value) {
    __shared__ T partial[32];
    value = warp_reduce<Operation>(value);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    // Threads may still read the result of the call before.
    __syncthreads();
    if (lane == 0) {
        partial[warp] = value;
    }
    __syncthreads();
    T result = partial[0];
    for (int other = 1; other < num_warps; ++other) {
        result = Operation<T>::combine(result, partial[other]);
    }
    return result;
}

template <class T> __device__ inline T block_sum(T value) {
    return block_reduce<Sum>(value);
}

template <class T> __device__ inline T block_max(T value) {
    return block_reduce<Max>(value);
}

// Whether a condition holds for a thread of the block. All threads get the result.
__device__ inline bool block_any(bool condition) {
    return block_reduce<Max>(condition ? 1.0f : 0.0f) > 0.0f;
}

// Stops the kernel, and with it the device, if a condition that callers promise does not hold, such as an index within a table.
__device__ inline void check(bool holds) {
    if (!holds) {
        __trap();
    }
}

// Number of columns that a block sums at a time.
constexpr int SUM_COLUMNS = WARP;

// Number of terms that are added before their sum is added to the total, which keeps the rounding error of long sums small.
constexpr int SUM_TERMS = 64;

// Sums `term(row, col)` over rows, for each column, and calls `write(col, sum)`. Blocks loop over groups of columns. The order of the terms
// depends on the number of rows alone.
template <class Term, class Write> __device__ inline void sum_columns(u64 rows, u64 cols, Term term, Write write) {
    constexpr int PARTS = BLOCK / SUM_COLUMNS;
    __shared__ float partial[PARTS][SUM_COLUMNS];
    int lane = threadIdx.x % SUM_COLUMNS, part = threadIdx.x / SUM_COLUMNS;
    for (u64 first = u64(blockIdx.x) * SUM_COLUMNS; first < cols; first += u64(gridDim.x) * SUM_COLUMNS) {
        u64 col = first + lane;
        float total = 0.0f;
        for (u64 start = part; col < cols && start < rows; start += PARTS * SUM_TERMS) {
            float sum = 0.0f;
            for (u64 row = start; row < rows && row < start + PARTS * SUM_TERMS; row += PARTS) {
                sum += term(row, col);
            }
            total += sum;
        }
        partial[part][lane] = total;
        __syncthreads();
        if (part == 0 && col < cols) {
            for (int other = 1; other < PARTS; ++other) {
                total += partial[other][lane];
            }
            write(col, total);
        }
        __syncthreads();
    }
}

__device__ inline float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// Philox4x32-10, as in `trireme_base::random`.
struct RandomKey {
    u32 key[2];
    u64 stream;
};

struct RandomWords {
    u32 words[4];
};

__device__ inline RandomWords random_words(RandomKey key, u64 counter) {
    u32 c[4] = {u32(counter), u32(counter >> 32), u32(key.stream), u32(key.stream >> 32)};
    u32 k[2] = {key.key[0], key.key[1]};
    for (int round = 0; round < 10; ++round) {
        u64 a = u64(0xD2511F53u) * c[0], b = u64(0xCD9E8D57u) * c[2];
        u32 next[4] = {u32(b >> 32) ^ c[1] ^ k[0], u32(b), u32(a >> 32) ^ c[3] ^ k[1], u32(a)};
        for (int word = 0; word < 4; ++word) {
            c[word] = next[word];
        }
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
}

// Word `index` of the stream.
__device__ inline u32 random_word(RandomKey key, u64 index) {
    return random_words(key, index / 4).words[index % 4];
}

// As `random_bits` in `kernels/cpu/optimizer/state.rs`.
__device__ inline u32 random_bits(u32 seed, u64 position) {
    seed ^= u32(position >> 32) * 0x85ebca6bu;
    u32 bits = u32(position) * 0x9e3779b1u ^ seed;
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}

// Rounds up or down at random with an expected error of 0. NaN stays NaN.
__device__ inline Bf16 stochastically_rounded(float value, u32 seed, u64 position) {
    u32 bits = __float_as_uint(value);
    bits = value != value ? bits | 0x00400000 : bits + (random_bits(seed, position) & 0xffff);
    return {u16(bits >> 16)};
}
