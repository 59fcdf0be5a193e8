// Products of small matrices by the lanes of a warp: on tensor cores in bf16 and f16, with FMAs in f32.
//
// A warp multiplies a left matrix of 16 rows by a right matrix of 8 columns, and adds the product to sums in f32. Each lane holds some
// elements of them, pairs of neighbours among the terms. Only this file knows which (PTX ISA, "Matrix Fragments for mma.m16n8k16").
#pragma once

#include "common.cuh"

static_assert(WARP == 32, "which lanes hold which elements is known for 32 lanes only");

// Rows of left matrices and columns of right ones.
constexpr int MMA_ROWS = 16, MMA_COLS = 8;

// Number of terms of each sum, which depends on the dtype of the operands.
template <class T> constexpr int MMA_TERMS = sizeof(T) == 4 ? 8 : 16;

// Two elements of 16 bits, the first in the low half.
template <class T> struct Pair {
    u32 word;
};

template <> struct alignas(8) Pair<f32> {
    f32 low, high;
};

template <class T> __device__ inline Pair<T> pair_of(T low, T high) {
    return {low.bits | u32(high.bits) << 16};
}

template <> __device__ inline Pair<f32> pair_of(f32 low, f32 high) {
    return {low, high};
}

// A lane's elements of a left matrix: rows `mma_row(0)` and `mma_row(2)` in turns.
template <class T> struct FragmentA {
    Pair<T> pairs[MMA_TERMS<T> / 4];
};

// A lane's elements of a right matrix, all of one column.
template <class T> struct FragmentB {
    Pair<T> pairs[MMA_TERMS<T> / 8];
};

// A lane's elements of a matrix of sums.
struct Accumulator {
    float values[4];
};

// Row and column of an element of `Accumulator`. Elements 0 and 1 have the same row, and so have 2 and 3.
__device__ inline int mma_row(int element) {
    return threadIdx.x % WARP / 4 + element / 2 * 8;
}

__device__ inline int mma_col(int element) {
    return threadIdx.x % 4 * 2 + element % 2;
}

#ifdef __CUDACC_RTC__
// d += a * b for matrices of 16 x 16 and 16 x 8.
#define MMA(T)                                                                         \
    __device__ inline void mma_m16n8k16_##T(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #T "." #T ".f32 "        \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));       \
    }
MMA(bf16)
MMA(f16)

// Loads four matrices of 8 x 8 elements of 16 bits from shared memory. Lane `i` passes the address of row `i % 8` of matrix `i / 8`, and
// gets two neighbours of each matrix, of row `i / 4`; with `ldmatrix_x4_trans`, of column `i / 4`.
#define LDMATRIX(name, qualifier)                                                      \
    __device__ inline void name(u32 (&words)[4], const void* row) {                    \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" qualifier ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])  \
                     : "r"(u32(__cvta_generic_to_shared(row)))                         \
                     : "memory");                                                      \
    }
LDMATRIX(ldmatrix_x4, "")
LDMATRIX(ldmatrix_x4_trans, ".trans")
#endif

__device__ inline void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Bf16) {
    mma_m16n8k16_bf16(d, a, b);
}

__device__ inline void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], F16) {
    mma_m16n8k16_f16(d, a, b);
}

// Adds a product. All lanes of the warp take part.
template <class T> __device__ inline void add_product(Accumulator& sums, const FragmentA<T>& left, const FragmentB<T>& right) {
    const u32 a[4] = {left.pairs[0].word, left.pairs[1].word, left.pairs[2].word, left.pairs[3].word};
    const u32 b[2] = {right.pairs[0].word, right.pairs[1].word};
    mma(sums.values, a, b, T());
}

__device__ inline Pair<f32> shuffled(Pair<f32> pair, int lane) {
    return {__shfl_sync(ALL_LANES, pair.low, lane), __shfl_sync(ALL_LANES, pair.high, lane)};
}

// Tensor cores would round the operands to 10 bits.
template <> __device__ inline void add_product(Accumulator& sums, const FragmentA<f32>& left, const FragmentB<f32>& right) {
    int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int term = 0; term < MMA_TERMS<f32> / 2; ++term) {
        int own = lane / 4 * 4 + term, of_col = lane % 4 * 8 + term;
        Pair<f32> a[2] = {shuffled(left.pairs[0], own), shuffled(left.pairs[1], own)};
        Pair<f32> b[2] = {shuffled(right.pairs[0], of_col), shuffled(right.pairs[0], of_col + 4)};
#pragma unroll
        for (int element = 0; element < 4; ++element) {
            Pair<f32> x = a[element / 2], y = b[element % 2];
            sums.values[element] = fmaf(x.high, y.high, fmaf(x.low, y.low, sums.values[element]));
        }
    }
}

// Makes sums the left matrix of another product: as many matrices of sums, side by side, as have `MMA_TERMS` columns.
template <class T> __device__ inline FragmentA<T> fragment_a_of(const Accumulator* sums) {
    FragmentA<T> left;
#pragma unroll
    for (int i = 0; i < MMA_TERMS<T> / 4; ++i) {
        const float* pair = sums[i / 2].values + i % 2 * 2;
        left.pairs[i] = pair_of(from_f32<T>(pair[0]), from_f32<T>(pair[1]));
    }
    return left;
}

// Sixteen bytes.
struct alignas(16) Chunk {
    u32 words[4];
};

template <class T> constexpr int CHUNK = sizeof(Chunk) / sizeof(T);

// Elements from a row of a tile in shared memory to the next. With one chunk more than the columns, matrices are read without conflicts of
// banks.
template <class T, int COLS> constexpr int TILE_STRIDE = COLS + CHUNK<T>;

// Copies a chunk of a row of `len` elements, with 0 beyond its end. `row` is null for a row of zeros. If rows are aligned, each begins at a
// multiple of a chunk, and its length is one.
template <class T> __device__ inline Chunk chunk_of(const T* row, int col, int len, bool is_aligned) {
    if (is_aligned) {
        return row && col < len ? *reinterpret_cast<const Chunk*>(row + col) : Chunk{};
    }
    union {
        T elements[CHUNK<T>];
        Chunk chunk;
    } read = {};
    for (int i = 0; row && i < CHUNK<T> && col + i < len; ++i) {
        read.elements[i] = row[col + i];
    }
    return read.chunk;
}

// Copies rows to a tile in shared memory. `row_at` returns the start of a row, or null for a row of zeros. All threads of the block take
// part; the caller places barriers before and after.
template <int ROWS, int COLS, class T, class RowAt>
__device__ inline void load_tile(T* tile, int len, bool is_aligned, RowAt row_at) {
    constexpr int CHUNKS = COLS / CHUNK<T>;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += BLOCK) {
        int row = i / CHUNKS, col = i % CHUNKS * CHUNK<T>;
        *reinterpret_cast<Chunk*>(tile + row * TILE_STRIDE<T, COLS> + col) = chunk_of(row_at(row), col, len, is_aligned);
    }
}

// Loads a left matrix, whose rows are rows of a tile from `row` on.
template <class T> __device__ inline FragmentA<T> load_a_of_rows(const T* tile, int stride, int row, int term) {
    int lane = threadIdx.x % WARP;
    FragmentA<T> left;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            left.pairs[i] = *reinterpret_cast<const Pair<T>*>(tile + (row + mma_row(2 * i)) * stride + term + mma_col(0));
        }
    } else {
        u32 words[4];
        ldmatrix_x4(words, tile + (row + lane % 16) * stride + term + lane / 16 * 8);
        left = {{{words[0]}, {words[1]}, {words[2]}, {words[3]}}};
    }
    return left;
}

// Loads a left matrix, whose columns are rows of a tile: elements from `row` on.
template <class T> __device__ inline FragmentA<T> load_a_of_cols(const T* tile, int stride, int row, int term) {
    int lane = threadIdx.x % WARP;
    FragmentA<T> left;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const T* from = tile + (term + mma_col(0)) * stride + row + mma_row(2 * i);
            left.pairs[i] = pair_of(from[0], from[stride]);
        }
    } else {
        u32 words[4];
        ldmatrix_x4_trans(words, tile + (term + lane / 16 * 8 + lane % 8) * stride + row + lane / 8 % 2 * 8);
        left = {{{words[0]}, {words[1]}, {words[2]}, {words[3]}}};
    }
    return left;
}

// Loads two right matrices side by side, whose columns are rows of a tile: 16 of them, from `col` on.
template <class T> __device__ inline void load_b_of_rows(FragmentB<T> (&right)[2], const T* tile, int stride, int col, int term) {
    int lane = threadIdx.x % WARP;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const T* from = tile + (col + i * MMA_COLS + lane / 4) * stride + term + lane % 4 * 2;
            right[i].pairs[0] = *reinterpret_cast<const Pair<T>*>(from);
        }
    } else {
        const T* row = tile + (col + lane / 16 * 8 + lane % 8) * stride + term + lane / 8 % 2 * 8;
        u32 words[4];
        ldmatrix_x4(words, row);
        right[0] = {words[0], words[1]};
        right[1] = {words[2], words[3]};
    }
}

// Loads two right matrices side by side, whose rows are rows of a tile: columns from `col` on.
template <class T> __device__ inline void load_b_of_cols(FragmentB<T> (&right)[2], const T* tile, int stride, int col, int term) {
    int lane = threadIdx.x % WARP;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const T* from = tile + (term + lane % 4 * 2) * stride + col + i * MMA_COLS + lane / 4;
            right[i].pairs[0] = pair_of(from[0], from[stride]);
        }
    } else {
        const T* row = tile + (term + lane / 8 % 2 * 8 + lane % 8) * stride + col + lane / 16 * 8;
        u32 words[4];
        ldmatrix_x4_trans(words, row);
        right[0] = {words[0], words[1]};
        right[1] = {words[2], words[3]};
    }
}

// Where the two rows of a matrix begin that a lane has, and which of them exist.
struct LaneRows {
    u64 starts[2];
    bool exists[2];

    template <class T> __device__ T* at(T* array, int row) const {
        return exists[row] ? array + starts[row] : nullptr;
    }
};

// Two rows of a left matrix of `COLS` terms, in global memory. If they are held, they stay in registers.
template <class T, int COLS, bool IS_HELD = sizeof(T) == 2 && COLS <= 128> struct GlobalRows {
    static constexpr int STEPS = COLS / MMA_TERMS<T>;
    // Null for a row of zeros.
    const T* rows[2];
    int len;
    bool is_aligned;
    FragmentA<T> held[IS_HELD ? STEPS : 1];

    __device__ GlobalRows(const T* array, const LaneRows& rows, int len, bool is_aligned)
        : rows{rows.at(array, 0), rows.at(array, 1)}, len(len), is_aligned(is_aligned) {
        if constexpr (IS_HELD) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                held[step] = load(step);
            }
        }
    }

    __device__ FragmentA<T> load(int step) const {
        FragmentA<T> left;
#pragma unroll
        for (int i = 0; i < MMA_TERMS<T> / 4; ++i) {
            const T* row = rows[i % 2];
            int col = step * MMA_TERMS<T> + i / 2 * 8 + threadIdx.x % 4 * 2;
            bool is_within = row && col + 1 < len;
            if (is_aligned) {
                left.pairs[i] = is_within ? *reinterpret_cast<const Pair<T>*>(row + col) : Pair<T>{};
            } else {
                left.pairs[i] = pair_of(row && col < len ? row[col] : T{}, is_within ? row[col + 1] : T{});
            }
        }
        return left;
    }

    __device__ FragmentA<T> at(int step) const {
        if constexpr (IS_HELD) {
            return held[step];
        } else {
            return load(step);
        }
    }
};

// Adds the products of rows with `N * MMA_COLS` rows of a tile, from `first` on.
template <class T, int COLS, bool IS_HELD, int N>
__device__ inline void add_products(Accumulator (&sums)[N], const GlobalRows<T, COLS, IS_HELD>& left, const T* tile, int first) {
    static_assert(N % 2 == 0, "right matrices are loaded by two");
#pragma unroll IS_HELD ? COLS / MMA_TERMS<T> : 1
    for (int step = 0; step < COLS / MMA_TERMS<T>; ++step) {
        FragmentA<T> own = left.at(step);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            FragmentB<T> right[2];
            load_b_of_rows(right, tile, TILE_STRIDE<T, COLS>, first + i * MMA_COLS, step * MMA_TERMS<T>);
            add_product(sums[i], own, right[0]);
            add_product(sums[i + 1], own, right[1]);
        }
    }
}

// Adds rows of a tile from `first` on, times weights: the matrices of `weights` side by side.
template <class T, int NUM_WEIGHTS, int N>
__device__ inline void add_weighted_rows(Accumulator (&sums)[N], const Accumulator (&weights)[NUM_WEIGHTS], const T* tile, int first) {
    static_assert(N % 2 == 0, "right matrices are loaded by two");
#pragma unroll
    for (int term = 0; term < NUM_WEIGHTS * MMA_COLS; term += MMA_TERMS<T>) {
        FragmentA<T> own = fragment_a_of<T>(weights + term / MMA_COLS);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            FragmentB<T> right[2];
            load_b_of_cols(right, tile, TILE_STRIDE<T, N * MMA_COLS>, i * MMA_COLS, first + term);
            add_product(sums[i], own, right[0]);
            add_product(sums[i + 1], own, right[1]);
        }
    }
}
