// Optimizer updates.

#include "common.cuh"

// A range of elements with one update; as `Piece` in `kernels/cpu/optimizer/pieces.rs`, with the first block of its 8-bit state. `update`
// is an index of the launch's updates.
struct Piece {
    u64 position, start, state, first_block;
    u32 len, update;
};

// Tables that are passed as arguments, which need no memory of the device; their sizes are known to `run/optimizer.rs`.
constexpr int PIECES = 48, UPDATES = 8, RUNS = 128, SCALES = 64;

struct Pieces {
    Piece pieces[PIECES];
};

// The kinds of `Update` in Rust.
enum Kind : u32 {
    ADAMW,
    ADAM,
    FROZEN_ADAM,
    FROZEN_ADAM_FROM_MOMENTUM,
    FROZEN_ADAM_MOMENTUM,
    MOMENTUM,
    LION,
    NORMS,
    LARS,
    LAMB_MOMENTS,
    LAMB,
    ADAFACTOR_VECTOR_MOMENT,
    ADAFACTOR_VECTOR,
    MUON_MOMENTUM,
    DESCEND,
    SIGN,
};

// The values that an update reads and writes, and its options.
enum Flags : u32 {
    WRITES_PARAMETER = 1,
    READS_GRADIENT = 2,
    WRITES_FIRST = 4,
    WRITES_SECOND = 8,
    IS_NESTEROV = 16,
    IS_FIRST_STEP = 32,
};

// The hyperparameters of an update and those that are derived from them; a kind uses some. `index` is its number in the pass.
struct Update {
    Kind kind;
    u32 flags, index;
    float lr, step_size, parameter_factor, momentum, beta2, nu, epsilon, weight_decay, grad_scale;
    float gradient_share, inverse_correction1, inverse_root_correction2, mixing;
};

struct Updates {
    Update updates[UPDATES];
};

// Bounds of Adafactor, and constants of the 8-bit states, as in `rules.rs` and `state.rs` of `kernels/cpu/optimizer`.
constexpr float GRADIENT_MAX = 1e15f, ADAFACTOR_MOMENT_MIN = 1e-30f;
constexpr float LARGEST = 3e38f, SIGNED_LEVELS = 127.0f, ROOT_LEVELS = 255.0f, SNAP = 0.01f, STEP_MIN = 1e-30f;

// As `StateDType` in Rust.
enum StateDType : u32 { STATE_F32, STATE_BF16, STATE_INT8 };

// A state of the optimizer. `values` is null if there is none.
struct State {
    void* values;
    float* steps;
    StateDType dtype;
    u32 is_second_moment;
};

// 256 elements of 8-bit state share a quantization step, so a thread block must update exactly these together.
static_assert(BLOCK == 256, "a block of 8-bit state has an element per thread");

__device__ inline float load_state(State state, u64 index, u64 block) {
    if (!state.values) {
        return 0.0f;
    }
    if (state.dtype == STATE_F32) {
        return static_cast<float*>(state.values)[index];
    }
    if (state.dtype == STATE_BF16) {
        return to_f32(static_cast<Bf16*>(state.values)[index]);
    }
    float code = float(static_cast<u8*>(state.values)[index]), step = state.steps[block];
    float root = code * step;
    return state.is_second_moment ? root * root : (code - 128.0f) * step;
}

__device__ inline u8 round_code(float value, u32 bits) {
    float shift = float(bits >> 20) * (1.0f / 4096.0f) + (0.5f / 4096.0f - 0.5f);
    return u8(__float_as_uint((value + shift) + 8388608.0f));
}

// Stores the value of each thread. All threads of the block take part; those that are not active have no element.
__device__ inline void store_state(State state, u64 index, u64 block, bool is_active, float value, u32 seed, u64 position) {
    if (state.dtype != STATE_INT8) {
        if (is_active && state.dtype == STATE_F32) {
            static_cast<float*>(state.values)[index] = value;
        } else if (is_active) {
            static_cast<Bf16*>(state.values)[index] = stochastically_rounded(value, seed, position);
        }
        return;
    }
    // Bits of magnitudes are ordered like the values. NaN counts as the largest value.
    u32 magnitude = block_max(is_active ? __float_as_uint(value) & 0x7fffffff : 0);
    float largest = fminf(__uint_as_float(magnitude), LARGEST);
    float levels = state.is_second_moment ? ROOT_LEVELS : SIGNED_LEVELS;
    float step = (state.is_second_moment ? sqrtf(largest) : largest) / levels;
    step = step < STEP_MIN ? 0.0f : __uint_as_float((__float_as_uint(step) + 0xff) & ~0xffu);
    if (threadIdx.x == 0) {
        state.steps[block] = step;
    }
    if (!is_active) {
        return;
    }
    float exact = (state.is_second_moment ? sqrtf(value) : value) / (step == 0.0f ? INFINITY : step);
    exact = exact > levels - SNAP ? levels : exact;
    if (state.is_second_moment) {
        exact = value > 0.0f && exact < 1.0f ? 1.0f : exact;
    } else {
        exact = (exact < SNAP - levels ? -levels : exact) + 128.0f;
    }
    static_cast<u8*>(state.values)[index] = round_code(exact, random_bits(seed, position));
}

// The values of an element, and its terms of the two sums of its piece.
struct Element {
    float p, g, m, v, first_term, second_term;
};

__device__ inline float sign(float x) {
    return x == 0.0f ? 0.0f : x != x ? x : copysignf(1.0f, x);
}

// NaN is kept.
__device__ inline float bounded(float g) {
    return g > GRADIENT_MAX ? GRADIENT_MAX : g < -GRADIENT_MAX ? -GRADIENT_MAX : g;
}

__device__ inline float bounded_square(float g) {
    return bounded(g) * bounded(g);
}

__device__ inline float adafactor_update(float g, float v) {
    return bounded(g) / sqrtf(v > ADAFACTOR_MOMENT_MIN ? v : ADAFACTOR_MOMENT_MIN);
}

__device__ inline float adam_denominator(const Update& u, float v) {
    return sqrtf(v) * u.inverse_root_correction2 + u.epsilon;
}

__device__ inline float adam_direction(const Update& u, float m, float g) {
    return u.nu == 1.0f ? m : u.nu * m + u.gradient_share * g;
}

__device__ inline float lamb_update(const Update& u, float p, float m, float v) {
    return m * u.inverse_correction1 / adam_denominator(u, v) + u.weight_decay * p;
}

__device__ inline void update_moments(const Update& u, Element& e, float g) {
    e.m = u.momentum * e.m + (1.0f - u.momentum) * g;
    e.v = u.beta2 * e.v + (1.0f - u.beta2) * g * g;
}

// Updates one element, with the bits of `Update::run` in `kernels/cpu/optimizer/rules.rs`. `lr` is the learning rate times the scale.
__device__ inline void apply(const Update& u, float lr, Element& e) {
    float g = e.g * u.grad_scale, product;
    switch (u.kind) {
    case ADAMW:
        update_moments(u, e, g);
        e.p = e.p * u.parameter_factor - u.step_size * adam_direction(u, e.m, g) / adam_denominator(u, e.v);
        break;
    case ADAM:
        g += u.weight_decay * e.p;
        update_moments(u, e, g);
        e.p -= u.step_size * adam_direction(u, e.m, g) / adam_denominator(u, e.v);
        break;
    case FROZEN_ADAM:
    case FROZEN_ADAM_FROM_MOMENTUM:
        e.m = u.kind == FROZEN_ADAM ? u.momentum * e.m + (1.0f - u.momentum) * g : g;
        product = u.step_size * e.m / (e.v == 0.0f ? INFINITY : adam_denominator(u, e.v));
        e.p = e.p * u.parameter_factor - product;
        break;
    case FROZEN_ADAM_MOMENTUM:
        e.p = u.momentum * e.m + (1.0f - u.momentum) * (e.p * u.grad_scale);
        break;
    case MOMENTUM:
        g += u.weight_decay * e.p;
        e.m = u.flags & IS_FIRST_STEP ? g : u.momentum * e.m + g;
        e.p -= lr * (u.flags & IS_NESTEROV ? g + u.momentum * e.m : e.m);
        break;
    case LION:
        product = lr * sign(u.momentum * e.m + (1.0f - u.momentum) * g);
        e.p = e.p * u.parameter_factor - product;
        e.m = u.beta2 * e.m + (1.0f - u.beta2) * g;
        break;
    case NORMS:
        e.first_term = e.p * e.p;
        e.second_term = g * g;
        break;
    case LARS:
        e.m = u.momentum * e.m + lr * (g + u.weight_decay * e.p);
        e.p -= e.m;
        break;
    case LAMB_MOMENTS:
        update_moments(u, e, g);
        product = lamb_update(u, e.p, e.m, e.v);
        e.first_term = e.p * e.p;
        e.second_term = product * product;
        break;
    case LAMB:
        e.p -= lr * lamb_update(u, e.p, e.m, e.v);
        break;
    case ADAFACTOR_VECTOR_MOMENT:
        e.m = (1.0f - u.mixing) * e.m + u.mixing * (bounded_square(g) + ADAFACTOR_MOMENT_MIN);
        product = adafactor_update(g, e.m);
        e.first_term = product * product;
        break;
    case ADAFACTOR_VECTOR:
        e.p = e.p * u.parameter_factor - lr * adafactor_update(g, e.m);
        break;
    case MUON_MOMENTUM:
        e.m = u.momentum * e.m + (1.0f - u.momentum) * g;
        e.p = u.flags & IS_NESTEROV ? u.momentum * e.m + (1.0f - u.momentum) * g : e.m;
        break;
    case DESCEND:
        e.p = e.p * u.parameter_factor - lr * e.g;
        break;
    case SIGN:
        e.p -= lr * sign(e.g);
        break;
    }
}

// Loops over the chunks of `BLOCK` elements of a piece. Each piece has `blocks_per_piece` thread blocks.
#define FOR_EACH_CHUNK(piece, chunk, blocks_per_piece)                                 \
    const Piece& piece = table.pieces[blockIdx.x / blocks_per_piece];                  \
    for (u64 chunk = blockIdx.x % blocks_per_piece; chunk * BLOCK < piece.len; chunk += blocks_per_piece)

// `sums` are two for each piece of the launch; if they are not null, a block has a piece of its own. `scales` are factors of the learning
// rates of all updates of the pass.
extern "C" __global__ void update(
    const __grid_constant__ Pieces table, const __grid_constant__ Updates updates, float* parameters, const float* grads,
    State first, State second, const float* scales, u32 seed, double* sums, u32 blocks_per_piece) {
    float first_sum = 0.0f, second_sum = 0.0f;
    FOR_EACH_CHUNK(piece, chunk, blocks_per_piece) {
        const Update& own = updates.updates[piece.update];
        u64 index = chunk * BLOCK + threadIdx.x, block = piece.first_block + chunk;
        bool is_active = index < piece.len;
        Element e = {};
        if (is_active) {
            e.p = parameters[piece.start + index];
            e.g = own.flags & READS_GRADIENT ? grads[piece.start + index] : 0.0f;
            e.m = load_state(first, piece.state + index, block);
            e.v = load_state(second, piece.state + index, block);
            apply(own, scales ? own.lr * scales[own.index] : own.lr, e);
        }
        if (is_active && own.flags & WRITES_PARAMETER) {
            parameters[piece.start + index] = e.p;
        }
        if (own.flags & WRITES_FIRST) {
            store_state(first, piece.state + index, block, is_active, e.m, seed, piece.position + index);
        }
        if (own.flags & WRITES_SECOND) {
            store_state(second, piece.state + index, block, is_active, e.v, ~seed, piece.position + index);
        }
        first_sum += e.first_term;
        second_sum += e.second_term;
    }
    if (sums) {
        double totals[2] = {block_sum(double(first_sum)), block_sum(double(second_sum))};
        if (threadIdx.x == 0) {
            sums[2 * blockIdx.x] = totals[0];
            sums[2 * blockIdx.x + 1] = totals[1];
        }
    }
}

// The moments and the step of a matrix; `FactoredMoments` and `FactoredStep` in `kernels/cpu/optimizer/factored.rs`.
struct Factored {
    const float* rows;
    const float* cols;
    const double* row_mean;
    u64 num_cols, offset;
    float parameter_factor, grad_scale;
};

__device__ inline float factored_element(const Factored& moments, const Piece& piece, u64 index, float g) {
    u64 place = piece.position - moments.offset + index;
    float row = float(double(moments.rows[place / moments.num_cols]) / *moments.row_mean);
    return adafactor_update(g * moments.grad_scale, row * moments.cols[place % moments.num_cols]);
}

extern "C" __global__ void factored_squares(
    const __grid_constant__ Pieces table, Factored of, const float* grads, double* sums) {
    float sum = 0.0f;
    FOR_EACH_CHUNK(piece, chunk, 1) {
        u64 index = chunk * BLOCK + threadIdx.x;
        if (index < piece.len) {
            float update = factored_element(of, piece, index, grads[piece.start + index]);
            sum += update * update;
        }
    }
    double total = block_sum(double(sum));
    if (threadIdx.x == 0) {
        sums[2 * blockIdx.x] = total;
        sums[2 * blockIdx.x + 1] = 0.0;
    }
}

extern "C" __global__ void factored_update(
    const __grid_constant__ Pieces table, Factored of, const float* lr, float* parameters, const float* grads,
    u32 blocks_per_piece) {
    FOR_EACH_CHUNK(piece, chunk, blocks_per_piece) {
        u64 index = chunk * BLOCK + threadIdx.x;
        if (index < piece.len) {
            float update = factored_element(of, piece, index, grads[piece.start + index]);
            float* p = parameters + (piece.start + index);
            *p = *p * of.parameter_factor - *lr * update;
        }
    }
}

// Number of leaves of a unit's summation tree; `NUM_LEAVES` in Rust.
constexpr int NUM_LEAVES = 1024;

// Sums all leaves in the order of the tree. The block's threads have written `leaves`; all get the sum.
__device__ inline double sum_leaves(double* leaves) {
    for (int distance = 1; distance < NUM_LEAVES; distance *= 2) {
        __syncthreads();
        for (int left = 2 * distance * int(threadIdx.x); left < NUM_LEAVES; left += 2 * distance * BLOCK) {
            leaves[left] += leaves[left + distance];
        }
    }
    __syncthreads();
    return leaves[0];
}

// As `LeafRun` in Rust.
struct LeafRun {
    u64 first_piece;
    u32 num_pieces, first_leaf;
};

struct LeafRuns {
    LeafRun runs[RUNS];
};

// A block per run. `out` points to the result of the launch's first run.
extern "C" __global__ void leaf_sums(
    const __grid_constant__ LeafRuns table, const double* piece_sums, u32 sum_index, double* out) {
    __shared__ double leaves[NUM_LEAVES];
    const LeafRun& run = table.runs[blockIdx.x];
    for (u32 leaf = threadIdx.x; leaf < NUM_LEAVES; leaf += BLOCK) {
        u32 piece = leaf - run.first_leaf;
        bool is_within = leaf >= run.first_leaf && piece < run.num_pieces;
        leaves[leaf] = is_within ? piece_sums[2 * (run.first_piece + piece) + sum_index] : 0.0;
    }
    double sum = sum_leaves(leaves);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = sum;
    }
}

// As `StepScale` in Rust; a trust ratio has no `num_elements`.
struct StepScale {
    double lr;
    u64 num_elements;
    float weight_decay, clip_threshold;
    u32 is_trust_ratio, is_relative;
};

struct StepScales {
    StepScale scales[SCALES];
};

extern "C" __global__ void step_scales(
    const __grid_constant__ StepScales table, const double* of_parameters, const double* of_updates, float* out, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        const StepScale& scale = table.scales[i];
        if (scale.is_trust_ratio) {
            double norm = sqrt(of_parameters[i]);
            double of_update = sqrt(of_updates[i]) + double(scale.weight_decay) * norm;
            float ratio = float(norm / of_update);
            bool is_usable = norm > 0.0 && of_update > 0.0 && fabsf(ratio) < INFINITY;
            out[i] = is_usable ? ratio : 1.0f;
        } else {
            double num_elements = double(scale.num_elements), size = scale.lr;
            if (scale.is_relative) {
                double rms = sqrt(of_parameters[i] / num_elements);
                size *= rms > 1e-3 ? rms : 1e-3;
            }
            double excess = sqrt(of_updates[i] / num_elements) / double(scale.clip_threshold);
            out[i] = float(size / (excess > 1.0 ? excess : 1.0));
        }
    }
}

// As `FactoredMatrix` in Rust.
struct FactoredMatrix {
    u64 cols, offset, stored_start, stored_end, buffer_start, leaf_len;
};

// The square of the element at a position of the unit, which is stored.
__device__ inline float square_at(const FactoredMatrix& matrix, const float* grads, float scale, u64 position) {
    return bounded_square(grads[position - matrix.buffer_start] * scale);
}

// A block per row.
extern "C" __global__ void row_squares(FactoredMatrix matrix, const float* grads, float scale, double* sums, u64 rows) {
    __shared__ double leaves[NUM_LEAVES];
    FOR_EACH_ROW(row, rows) {
        for (u32 leaf = threadIdx.x; leaf < NUM_LEAVES; leaf += BLOCK) {
            leaves[leaf] = 0.0;
        }
        u64 start = max(matrix.offset + row * matrix.cols, matrix.stored_start);
        u64 end = min(matrix.offset + (row + 1) * matrix.cols, matrix.stored_end);
        for (u64 first = start; first < end;) {
            u64 leaf = first / matrix.leaf_len, next = min(end, (leaf + 1) * matrix.leaf_len);
            float sum = 0.0f;
            for (u64 position = first + threadIdx.x; position < next; position += BLOCK) {
                sum += square_at(matrix, grads, scale, position);
            }
            double total = block_sum(double(sum));
            if (threadIdx.x == 0) {
                leaves[leaf] = total;
            }
            first = next;
        }
        double sum = sum_leaves(leaves);
        if (threadIdx.x == 0) {
            sums[row] = sum;
        }
        __syncthreads();
    }
}

// Sums the squares of a column over the stored elements of one leaf.
__device__ inline double column_leaf(const FactoredMatrix& matrix, const float* grads, float scale, u64 col, u64 leaf) {
    u64 start = max(leaf * matrix.leaf_len, matrix.stored_start), end = min((leaf + 1) * matrix.leaf_len, matrix.stored_end);
    float sum = 0.0f;
    if (start < end) {
        u64 first = start - matrix.offset, row = first / matrix.cols + (first % matrix.cols > col);
        for (u64 position = matrix.offset + row * matrix.cols + col; position < end; position += matrix.cols) {
            sum += square_at(matrix, grads, scale, position);
        }
    }
    return double(sum);
}

// A block per `SUM_COLUMNS` columns. Each of its parts sums a subtree of leaves.
extern "C" __global__ void column_squares(FactoredMatrix matrix, const float* grads, float scale, double* sums, u64 cols) {
    constexpr int PARTS = BLOCK / SUM_COLUMNS, LEAVES = NUM_LEAVES / PARTS;
    __shared__ double partial[PARTS][SUM_COLUMNS];
    int lane = threadIdx.x % SUM_COLUMNS, part = threadIdx.x / SUM_COLUMNS;
    for (u64 first = u64(blockIdx.x) * SUM_COLUMNS; first < cols; first += u64(gridDim.x) * SUM_COLUMNS) {
        u64 col = first + lane;
        double total = 0.0;
        if (col < cols) {
            // Left halves of subtrees whose right halves are still to come, by their heights.
            double left[8];
            for (int leaf = 0; leaf < LEAVES; ++leaf) {
                total = column_leaf(matrix, grads, scale, col, u64(part) * LEAVES + leaf);
                int height = 0;
                for (; leaf >> height & 1; ++height) {
                    total = left[height] + total;
                }
                left[height] = total;
            }
        }
        partial[part][lane] = total;
        for (int distance = 1; distance < PARTS; distance *= 2) {
            __syncthreads();
            if (part % (2 * distance) == 0) {
                partial[part][lane] += partial[part + distance][lane];
            }
        }
        if (part == 0 && col < cols) {
            sums[col] = partial[0][lane];
        }
        __syncthreads();
    }
}

extern "C" __global__ void factored_moments(const double* sums, u64 num_terms, float mixing, float* moments, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        double square = sums[i] / double(num_terms) + double(ADAFACTOR_MOMENT_MIN);
        moments[i] = float((1.0 - double(mixing)) * double(moments[i]) + double(mixing) * square);
    }
}

// The largest magnitude of a block's elements; NaN is ignored. There are at most `BLOCK` blocks, so that one block can combine results.
extern "C" __global__ void block_magnitudes(const float* x, float* largest, u64 num) {
    float own = 0.0f;
    FOR_EACH_ELEMENT(i, num) {
        own = fmaxf(own, fabsf(x[i]));
    }
    own = block_max(own);
    if (threadIdx.x == 0) {
        largest[blockIdx.x] = own;
    }
}

// Divides by the largest magnitude, or sets all to 0 if it is subnormal.
extern "C" __global__ void divide_by_largest(const float* largest, u32 num_largest, float* x, u64 num) {
    float magnitude = block_max(threadIdx.x < num_largest ? largest[threadIdx.x] : 0.0f);
    float inverse = magnitude >= 1.17549435e-38f ? 1.0f / magnitude : 0.0f;
    FOR_EACH_ELEMENT(i, num) {
        x[i] *= inverse;
    }
}

// The sum of squares of a block's elements.
extern "C" __global__ void block_squares(const float* x, float* sums, u64 num) {
    float own = 0.0f;
    FOR_EACH_ELEMENT(i, num) {
        own += x[i] * x[i];
    }
    own = block_sum(own);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = own;
    }
}

// Divides by the root of the sum of squares, to which `epsilon` is added.
extern "C" __global__ void divide_by_norm(const float* squares, u32 num_squares, float epsilon, float* x, u64 num) {
    double norm = sqrt(block_sum(threadIdx.x < num_squares ? double(squares[threadIdx.x]) : 0.0));
    float inverse = 1.0f / (float(norm) + epsilon);
    FOR_EACH_ELEMENT(i, num) {
        x[i] *= inverse;
    }
}

extern "C" __global__ void axpby(float* x, float a, const float* y, float b, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        x[i] = a * x[i] + b * y[i];
    }
}
