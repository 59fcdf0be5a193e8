// Grouped matmuls, and the sort of rows by group.

#include "common.cuh"

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

__device__ inline float rounded(float value, FloatDType precision) {
    return precision == DTYPE_BF16 ? to_f32(from_f32<Bf16>(value))
         : precision == DTYPE_F16  ? to_f32(from_f32<F16>(value))
                                   : value;
}

// A block computes a tile of `TILE` rows and columns, `STEP` terms at a time. A thread has `OWN` rows and columns, `TILE / OWN` apart.
constexpr int TILE = 64, STEP = 16, OWN = 4, THREADS_PER_SIDE = TILE / OWN;
static_assert(THREADS_PER_SIDE * THREADS_PER_SIDE == BLOCK, "each thread has a part of the tile");

// Where a tile begins, and the number of terms.
struct Tile {
    u64 row, col, num_terms;
};

// Adds the terms of a tile. `left(row, term)` and `right(term, col)` are elements of the operands, which are 0 outside of them.
template <class Left, class Right>
__device__ inline void add_terms(float (&sums)[OWN][OWN], Tile tile, Left left, Right right) {
    __shared__ float lefts[STEP][TILE + 1], rights[STEP][TILE + 1];
    int row = threadIdx.x / THREADS_PER_SIDE, col = threadIdx.x % THREADS_PER_SIDE;
    for (u64 first = 0; first < tile.num_terms; first += STEP) {
        for (int i = threadIdx.x; i < STEP * TILE; i += BLOCK) {
            int place = i % TILE, term = i / TILE;
            bool is_within = first + term < tile.num_terms;
            lefts[term][place] = is_within ? left(tile.row + place, first + term) : 0.0f;
            rights[term][place] = is_within ? right(first + term, tile.col + place) : 0.0f;
        }
        __syncthreads();
        for (int term = 0; term < STEP; ++term) {
            for (int i = 0; i < OWN; ++i) {
                for (int j = 0; j < OWN; ++j) {
                    float a = lefts[term][row + i * THREADS_PER_SIDE], b = rights[term][col + j * THREADS_PER_SIDE];
                    sums[i][j] = fmaf(a, b, sums[i][j]);
                }
            }
        }
        __syncthreads();
    }
}

// Calls `write(row, col, sum)` for the elements of the thread.
template <class Write> __device__ inline void for_own(const float (&sums)[OWN][OWN], Tile tile, Write write) {
    for (int i = 0; i < OWN; ++i) {
        for (int j = 0; j < OWN; ++j) {
            u64 row = tile.row + threadIdx.x / THREADS_PER_SIDE + i * THREADS_PER_SIDE;
            u64 col = tile.col + threadIdx.x % THREADS_PER_SIDE + j * THREADS_PER_SIDE;
            write(row, col, sums[i][j]);
        }
    }
}

// A block per tile of the result. `num_slots` is at least the number of tiles of rows of all groups and of the rows of no group.
extern "C" __global__ void grouped_matmul(
    const u32* starts, u64 num_groups, Floats left, Floats right, Floats out, FloatDType precision, bool is_transposed,
    u64 rows, u64 cols, u64 inner, u64 num_slots) {
    u64 slot = blockIdx.x % num_slots, first_col = blockIdx.x / num_slots * TILE;
    // The rows after the last group are a group of their own, whose products are 0.
    u64 group = 0, start = 0, end = 0;
    for (; group <= num_groups; ++group) {
        start = end;
        end = group < num_groups ? starts[group + 1] - starts[0] : rows;
        check(start <= end && end <= rows);
        u64 num_tiles = (end - start + TILE - 1) / TILE;
        if (slot < num_tiles) {
            break;
        }
        slot -= num_tiles;
    }
    if (group > num_groups) {
        return;
    }
    Tile tile = {start + slot * TILE, first_col, group < num_groups ? inner : 0};
    u64 block = group * inner * cols;
    float sums[OWN][OWN] = {};
    auto left_at = [&](u64 row, u64 term) {
        return row < end ? rounded(load(left, row * inner + term), precision) : 0.0f;
    };
    auto right_at = [&](u64 term, u64 col) {
        u64 index = is_transposed ? col * inner + term : term * cols + col;
        return col < cols ? rounded(load(right, block + index), precision) : 0.0f;
    };
    add_terms(sums, tile, left_at, right_at);
    for_own(sums, tile, [&](u64 row, u64 col, float sum) {
        if (row < end && col < cols) {
            store(out, row * cols + col, sum);
        }
    });
}

// Largest height of the tree in which the products of parts are added.
constexpr int HEIGHT_MAX = 16;

// A block per tile of each group's block of the result. The products of parts are added as in `kernels/cpu/matmul/grouped.rs`.
extern "C" __global__ void grouped_transposed_matmul(
    const u32* starts, u64 num_groups, u32 num_parts, Floats left, Floats right, float* out, FloatDType precision,
    bool accumulate, u64 rows, u64 cols, u64 inner, u64 tiles_per_row, u64 tiles_per_block) {
    u64 group = blockIdx.x / tiles_per_block, index = blockIdx.x % tiles_per_block;
    Tile tile = {index / tiles_per_row * TILE, index % tiles_per_row * TILE, 0};
    u64 part = group * num_parts;
    auto product = [&](float (&sums)[OWN][OWN]) {
        u64 start = starts[part] - starts[0], end = starts[part + 1] - starts[0];
        check(start <= end && end <= inner);
        ++part;
        tile.num_terms = end - start;
        auto left_at = [&](u64 row, u64 term) {
            return row < rows ? rounded(load(left, (start + term) * rows + row), precision) : 0.0f;
        };
        auto right_at = [&](u64 term, u64 col) {
            return col < cols ? rounded(load(right, (start + term) * cols + col), precision) : 0.0f;
        };
        add_terms(sums, tile, left_at, right_at);
    };
    float waiting[HEIGHT_MAX][OWN][OWN];
    int num_waiting = 0;
    u32 num_terms = 1u << (31 - __clz(int(num_parts)));
    for (u32 term = 0; term < num_terms; ++term) {
        float own[OWN][OWN] = {};
        product(own);
        if (term < num_parts - num_terms) {
            float next[OWN][OWN] = {};
            product(next);
            for (int i = 0; i < OWN * OWN; ++i) {
                own[i / OWN][i % OWN] += next[i / OWN][i % OWN];
            }
        }
        for (u32 left_terms = term; left_terms & 1; left_terms >>= 1) {
            --num_waiting;
            for (int i = 0; i < OWN * OWN; ++i) {
                own[i / OWN][i % OWN] = waiting[num_waiting][i / OWN][i % OWN] + own[i / OWN][i % OWN];
            }
        }
        for (int i = 0; i < OWN * OWN; ++i) {
            waiting[num_waiting][i / OWN][i % OWN] = own[i / OWN][i % OWN];
        }
        ++num_waiting;
    }
    for_own(waiting[0], tile, [&](u64 row, u64 col, float sum) {
        if (row < rows && col < cols) {
            float* to = out + ((group * rows + row) * cols + col);
            *to = accumulate ? *to + sum : sum;
        }
    });
}

// Number of consecutive rows of a thread in the sort.
constexpr int ROWS_PER_THREAD = 16, WINDOW = BLOCK * ROWS_PER_THREAD;

// The position of rows that their group has no room for, until they have one.
constexpr u32 NO_ROOM = 0xffffffff;

// Calls `place(row, rank)` for each row of `[start, end)` that is chosen, with the number of chosen ones before it, from `first_rank` on.
// Returns the number of all. All threads of the block take part.
template <class IsChosen, class Place>
__device__ inline u32 rank_rows(u64 start, u64 end, u32 first_rank, IsChosen is_chosen, Place place) {
    __shared__ u32 counts[BLOCK];
    u32 total = 0;
    for (u64 window = start; window < end; window += WINDOW) {
        u64 first = window + u64(threadIdx.x) * ROWS_PER_THREAD;
        u32 own = 0;
        for (u64 row = first; row < first + ROWS_PER_THREAD && row < end; ++row) {
            own += is_chosen(row);
        }
        counts[threadIdx.x] = own;
        // An inclusive prefix sum.
        for (int distance = 1; distance < BLOCK; distance *= 2) {
            __syncthreads();
            u32 before = int(threadIdx.x) >= distance ? counts[threadIdx.x - distance] : 0;
            __syncthreads();
            counts[threadIdx.x] += before;
        }
        __syncthreads();
        u32 rank = first_rank + total + counts[threadIdx.x] - own;
        for (u64 row = first; row < first + ROWS_PER_THREAD && row < end; ++row) {
            if (is_chosen(row)) {
                place(row, rank++);
            }
        }
        total += counts[BLOCK - 1];
        __syncthreads();
    }
    return total;
}

// A block per group, or one for rows of no group. Writes the number of rows that each group takes to `starts`, and the ranks of these rows
// within their group to `positions`. `factor` is the capacity of a group, as a multiple of an even share of `rows_per_capacity` rows.
extern "C" __global__ void rank_in_groups(
    const u32* groups, u64 num_rows, u64 rows_per_capacity, double factor, u32* starts, u32* positions, u64 num_groups) {
    u64 group = blockIdx.x;
    u32 num_taken = 0;
    for (u64 start = 0; start < num_rows; start += min(rows_per_capacity, num_rows - start)) {
        u64 end = start + min(rows_per_capacity, num_rows - start);
        u32 num_valid = 0;
        for (u64 row = start + threadIdx.x; row < end; row += BLOCK) {
            check(groups[row] <= num_groups);
            num_valid += groups[row] < num_groups;
        }
        num_valid = block_sum(num_valid);
        // At least one, also without rows and with an infinite factor, whose share is NaN.
        double share = ceil(factor * double(num_valid) / double(num_groups));
        u32 capacity = share >= 1.0 ? u32(min(share, 4294967295.0)) : 1;
        capacity = group == num_groups ? 0 : capacity;
        u32 num_wanting = rank_rows(
            start, end, 0, [&](u64 row) { return groups[row] == group; },
            [&](u64 row, u32 rank) { positions[row] = rank < capacity ? num_taken + rank : NO_ROOM; });
        num_taken += min(num_wanting, capacity);
    }
    if (threadIdx.x == 0 && group < num_groups) {
        starts[group + 1] = num_taken;
    }
}

// One block: makes numbers of rows the starts of groups, and places rows of no group after them.
extern "C" __global__ void start_groups(u64 num_rows, u64 num_groups, u32* starts, u32* order, u32* positions) {
    if (threadIdx.x == 0) {
        u32 start = 0;
        starts[0] = 0;
        for (u64 group = 1; group <= num_groups; ++group) {
            start += starts[group];
            starts[group] = start;
        }
    }
    __syncthreads();
    rank_rows(
        0, num_rows, starts[num_groups], [&](u64 row) { return positions[row] == NO_ROOM; },
        [&](u64 row, u32 rank) { order[rank] = u32(row); });
}

// Turns ranks within groups into positions.
extern "C" __global__ void place_rows(const u32* groups, const u32* starts, u32* order, u32* positions, u64 num) {
    FOR_EACH_ELEMENT(row, num) {
        if (positions[row] != NO_ROOM) {
            positions[row] += starts[groups[row]];
            order[positions[row]] = u32(row);
        }
    }
}

// The positions of rows of no group, which are last in the order.
extern "C" __global__ void place_others(const u32* starts, u64 num_groups, const u32* order, u32* positions, u64 num) {
    FOR_EACH_ELEMENT(position, num) {
        if (position >= starts[num_groups]) {
            positions[order[position]] = u32(position);
        }
    }
}

// One block.
extern "C" __global__ void ungrouped_rows(
    const u32* starts, u64 num_groups, const u32* positions, u64 num_choices, const float* weights, double* out, u64 num) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < num; i += BLOCK) {
        if (positions[i] >= starts[num_groups] - starts[0]) {
            sum += weights ? double(weights[i / num_choices]) : 1.0;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *out = sum;
    }
}
