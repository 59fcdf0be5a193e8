// Grouped matmuls. Kernels are generated for a precision of the products, and for the height of the tree in which those of parts are added.

#pragma once

#include "mma.cuh"

// Dtypes of matrices, and of the products' operands; `dtype_code` in `run/grouped.rs`.
enum FloatDType : u32 { DTYPE_F32, DTYPE_BF16, DTYPE_F16 };

// A matrix of any float dtype.
struct Floats {
    void* values;
    FloatDType dtype;
};

__device__ inline float load(const Floats& from, u64 index) {
    switch (from.dtype) {
    case DTYPE_BF16:
        return to_f32(static_cast<Bf16*>(from.values)[index]);
    case DTYPE_F16:
        return to_f32(static_cast<F16*>(from.values)[index]);
    default:
        return static_cast<float*>(from.values)[index];
    }
}

__device__ inline void store(const Floats& to, u64 index, float value) {
    switch (to.dtype) {
    case DTYPE_BF16:
        static_cast<Bf16*>(to.values)[index] = from_f32<Bf16>(value);
        break;
    case DTYPE_F16:
        static_cast<F16*>(to.values)[index] = from_f32<F16>(value);
        break;
    default:
        static_cast<float*>(to.values)[index] = value;
    }
}

// The part of a matrix that begins at an element.
__device__ inline Floats part_of(const Floats& from, u64 start) {
    return {static_cast<char*>(from.values) + start * (from.dtype == DTYPE_F32 ? 4 : 2), from.dtype};
}

template <class T> constexpr FloatDType DTYPE = DTYPE_F32;
template <> constexpr FloatDType DTYPE<Bf16> = DTYPE_BF16;
template <> constexpr FloatDType DTYPE<F16> = DTYPE_F16;

// A block computes a tile of the result, some terms at a time. A warp has a part of the tile of 2 by 4 matrices of sums.
constexpr int TILE_ROWS = 128, TILE_COLS = 64, TILE_TERMS = 32;
constexpr int WARP_ROWS = 2 * MMA_ROWS, WARP_COLS = 4 * MMA_COLS, WARPS_PER_ROW = TILE_COLS / WARP_COLS;
static_assert(TILE_ROWS / WARP_ROWS * WARPS_PER_ROW == BLOCK / WARP, "each warp has a part of the tile");

struct TileAccumulator {
    Accumulator values[2][4];
};

// Calls `visit(row, col, sum)` with the place of each of a lane's sums in the tile.
template <class S, class Visit> __device__ inline void for_each_sum(S& sums, Visit visit) {
    int warp = threadIdx.x / WARP, first_row = warp / WARPS_PER_ROW * WARP_ROWS, first_col = warp % WARPS_PER_ROW * WARP_COLS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int element = 0; element < 4; ++element) {
                int row = first_row + i * MMA_ROWS + mma_row(element), col = first_col + j * MMA_COLS + mma_col(element);
                visit(row, col, sums.values[i][j].values[element]);
            }
        }
    }
}

// Rows and columns of a matrix: those of a tile begin at `row` and `col`, and the matrix ends before `row_end` and `col_end`.
struct Part {
    u64 row, row_end, col, col_end;
};

// Copies a part of a matrix to a tile in shared memory, rounded to its dtype, with zeros beyond the end. `stride` is the number of columns.
template <int ROWS, int COLS, class T>
__device__ inline void load_part(T* tile, const Floats& from, u64 stride, Part part) {
    constexpr int CHUNKS = COLS / CHUNK<T>;
    bool has_chunks = from.dtype == DTYPE<T> && stride % CHUNK<T> == 0 && u64(from.values) % sizeof(Chunk) == 0;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += BLOCK) {
        u64 row = part.row + i / CHUNKS, col = part.col + i % CHUNKS * CHUNK<T>, start = row * stride + col;
        T* to = tile + i / CHUNKS * TILE_STRIDE<T, COLS> + i % CHUNKS * CHUNK<T>;
        bool exists = row < part.row_end;
        if (has_chunks && exists && col + CHUNK<T> <= part.col_end) {
            *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(static_cast<const T*>(from.values) + start);
            continue;
        }
        for (int place = 0; place < CHUNK<T>; ++place) {
            bool is_within = exists && col + place < part.col_end;
            to[place] = is_within ? from_f32<T>(load(from, start + place)) : T{};
        }
    }
}

// Which dim of an operand its rows in memory are: that of the result, or the one that is summed over.
enum Layout { ROWS_OF_RESULT, ROWS_OF_TERMS };

// An operand of a product: the part of the tile's rows or columns, and where the terms begin.
struct Operand {
    Floats from;
    u64 stride, first, end, first_term;
};

// Copies `TILE_TERMS` terms of an operand to shared memory, from `term` on. Terms from `num_terms` on are 0.
template <int LEN, Layout LAYOUT, class T>
__device__ inline void load_operand(T* tile, const Operand& at, u64 term, u64 num_terms) {
    u64 first = at.first_term + term, end = at.first_term + num_terms;
    if constexpr (LAYOUT == ROWS_OF_RESULT) {
        load_part<LEN, TILE_TERMS>(tile, at.from, at.stride, {at.first, at.end, first, end});
    } else {
        load_part<TILE_TERMS, LEN>(tile, at.from, at.stride, {first, end, at.first, at.end});
    }
}

// Adds the products of `num_terms` terms to the sums of a tile. All threads of the block take part.
template <class T, Layout LEFT, Layout RIGHT>
__device__ inline void add_terms(TileAccumulator& sums, const Operand& left, const Operand& right, u64 num_terms) {
    constexpr int LEFT_STRIDE = TILE_STRIDE<T, LEFT == ROWS_OF_RESULT ? TILE_TERMS : TILE_ROWS>;
    constexpr int RIGHT_STRIDE = TILE_STRIDE<T, RIGHT == ROWS_OF_RESULT ? TILE_TERMS : TILE_COLS>;
    __shared__ __align__(16) T lefts[(LEFT == ROWS_OF_RESULT ? TILE_ROWS : TILE_TERMS) * LEFT_STRIDE];
    __shared__ __align__(16) T rights[(RIGHT == ROWS_OF_RESULT ? TILE_COLS : TILE_TERMS) * RIGHT_STRIDE];
    int warp = threadIdx.x / WARP, row = warp / WARPS_PER_ROW * WARP_ROWS, col = warp % WARPS_PER_ROW * WARP_COLS;
    bool is_idle = left.first + row >= left.end || right.first + col >= right.end;
    for (u64 first = 0; first < num_terms; first += TILE_TERMS) {
        __syncthreads();
        load_operand<TILE_ROWS, LEFT>(lefts, left, first, num_terms);
        load_operand<TILE_COLS, RIGHT>(rights, right, first, num_terms);
        __syncthreads();
#pragma unroll
        for (int term = 0; term < TILE_TERMS; term += MMA_TERMS<T>) {
            if (is_idle || first + term >= num_terms) {
                continue;
            }
            FragmentA<T> own[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (LEFT == ROWS_OF_RESULT) {
                    own[i] = load_a_of_rows(lefts, LEFT_STRIDE, row + i * MMA_ROWS, term);
                } else {
                    own[i] = load_a_of_cols(lefts, LEFT_STRIDE, row + i * MMA_ROWS, term);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                FragmentB<T> others[2];
                if constexpr (RIGHT == ROWS_OF_RESULT) {
                    load_b_of_rows(others, rights, RIGHT_STRIDE, col + j * MMA_COLS, term);
                } else {
                    load_b_of_cols(others, rights, RIGHT_STRIDE, col + j * MMA_COLS, term);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    add_product(sums.values[i][j], own[i], others[0]);
                    add_product(sums.values[i][j + 1], own[i], others[1]);
                }
            }
        }
    }
}

// A block per tile of the result. `num_slots` is at least the number of tiles of rows of all groups and of the rows of no group.
template <class T, bool IS_TRANSPOSED>
__device__ void grouped_matmul(
    const u32* starts, u64 num_groups, Floats left, Floats right, Floats out, u64 rows, u64 cols, u64 inner, u64 num_slots) {
    u64 slot = blockIdx.x % num_slots, first_col = blockIdx.x / num_slots * TILE_COLS;
    // The rows after the last group are a group of their own, whose products are 0.
    u64 group = 0, start = 0, end = 0;
    for (; group <= num_groups; ++group) {
        start = end;
        end = group < num_groups ? starts[group + 1] - starts[0] : rows;
        check(start <= end && end <= rows);
        u64 num_tiles = (end - start + TILE_ROWS - 1) / TILE_ROWS;
        if (slot < num_tiles) {
            break;
        }
        slot -= num_tiles;
    }
    if (group > num_groups) {
        return;
    }
    u64 first_row = start + slot * TILE_ROWS;
    TileAccumulator sums = {};
    if (group < num_groups) {
        Floats block = part_of(right, group * inner * cols);
        Operand of_cols = {block, IS_TRANSPOSED ? inner : cols, first_col, cols, 0};
        constexpr Layout RIGHT = IS_TRANSPOSED ? ROWS_OF_RESULT : ROWS_OF_TERMS;
        add_terms<T, ROWS_OF_RESULT, RIGHT>(sums, {left, inner, first_row, end, 0}, of_cols, inner);
    }
    for_each_sum(sums, [&](int row, int col, float sum) {
        if (first_row + row < end && first_col + col < cols) {
            store(out, (first_row + row) * cols + first_col + col, sum);
        }
    });
}

__device__ inline TileAccumulator operator+(const TileAccumulator& left, const TileAccumulator& right) {
    TileAccumulator sums;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        float& sum = sums.values[i / 16][i / 4 % 4].values[i % 4];
        sum = left.values[i / 16][i / 4 % 4].values[i % 4] + right.values[i / 16][i / 4 % 4].values[i % 4];
    }
    return sums;
}

// A block per tile of each group's block of the result. The products of parts are added as in `kernels/cpu/matmul/grouped.rs`: `HEIGHT` is
// the most sums that wait for another.
template <class T, int HEIGHT>
__device__ void grouped_transposed_matmul(
    const u32* starts, u64 num_groups, u32 num_parts, Floats left, Floats right, float* out, bool accumulate, u64 rows,
    u64 cols, u64 inner, u64 tiles_per_row, u64 tiles_per_block) {
    u64 group = blockIdx.x / tiles_per_block, index = blockIdx.x % tiles_per_block;
    u64 first_row = index / tiles_per_row * TILE_ROWS, first_col = index % tiles_per_row * TILE_COLS;
    u64 part = group * num_parts;
    auto product = [&]() {
        u64 start = starts[part] - starts[0], end = starts[part + 1] - starts[0];
        check(start <= end && end <= inner);
        ++part;
        TileAccumulator sums = {};
        add_terms<T, ROWS_OF_TERMS, ROWS_OF_TERMS>(
            sums, {left, rows, first_row, rows, start}, {right, cols, first_col, cols, start}, end - start);
        return sums;
    };
    TileAccumulator waiting[HEIGHT];
    int num_waiting = 0;
    u32 num_terms = 1u << (31 - __clz(int(num_parts)));
    for (u32 term = 0; term < num_terms; ++term) {
        TileAccumulator own = product();
        if (term < num_parts - num_terms) {
            own = own + product();
        }
        for (u32 left_terms = term; left_terms & 1; left_terms >>= 1) {
            own = waiting[--num_waiting] + own;
        }
        waiting[num_waiting++] = own;
    }
    for_each_sum(waiting[0], [&](int row, int col, float sum) {
        if (first_row + row < rows && first_col + col < cols) {
            float* to = out + ((group * rows + first_row + row) * cols + first_col + col);
            *to = accumulate ? *to + sum : sum;
        }
    });
}

#define GROUPED_MATMUL(name, T, IS_TRANSPOSED)                                         \
    extern "C" __global__ void name(                                                   \
        const u32* starts, u64 num_groups, Floats left, Floats right, Floats out, u64 rows, u64 cols, u64 inner, \
        u64 num_slots) {                                                               \
        grouped_matmul<T, IS_TRANSPOSED>(starts, num_groups, left, right, out, rows, cols, inner, num_slots); \
    }

#define GROUPED_TRANSPOSED_MATMUL(name, T, HEIGHT)                                     \
    extern "C" __global__ void name(                                                   \
        const u32* starts, u64 num_groups, u32 num_parts, Floats left, Floats right, float* out, bool accumulate, u64 rows, \
        u64 cols, u64 inner, u64 tiles_per_row, u64 tiles_per_block) {                 \
        grouped_transposed_matmul<T, HEIGHT>(                                          \
            starts, num_groups, num_parts, left, right, out, accumulate, rows, cols, inner, tiles_per_row, tiles_per_block); \
    }
