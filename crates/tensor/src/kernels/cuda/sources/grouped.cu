// The sort of rows by group. See `grouped.cuh` for grouped matmuls.

#include "common.cuh"

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
