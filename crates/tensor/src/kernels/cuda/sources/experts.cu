// Routing of tokens to experts.

#include "common.cuh"

// As `RoutingRule` in Rust. There are no groups if `num_groups` is 0.
struct Routing {
    u64 num_choices, num_groups, num_chosen_groups;
    u32 normalizes;
    float scale;
};

// Largest number of groups of experts; `ExpertGroups::NUM_MAX` in Rust.
constexpr int GROUPS_MAX = 64;

// An expert or a group, and its score. None has the id `NONE`.
constexpr u32 NONE = 0xffffffff;

struct Candidate {
    float score;
    u32 id;
};

// The better of two: of equal ones, the one with the lower id.
__device__ inline Candidate better(Candidate left, Candidate right) {
    if (left.id == NONE || right.id == NONE) {
        return left.id == NONE ? right : left;
    }
    bool is_right = left.id < right.id ? right.score > left.score : !(left.score > right.score);
    return is_right ? right : left;
}

__device__ inline Candidate warp_best(Candidate own) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        Candidate other = {__shfl_xor_sync(ALL_LANES, own.score, distance), __shfl_xor_sync(ALL_LANES, own.id, distance)};
        own = better(own, other);
    }
    return own;
}

// The factor that turns scores of chosen experts into weights; `sum` becomes the sum by which they are normalized.
__device__ inline float weight_factor(const Routing& rule, const float* scores, const u32* ids, float& sum) {
    sum = 1.0f;
    if (rule.normalizes) {
        sum = 0.0f;
        for (u64 choice = 0; choice < rule.num_choices; ++choice) {
            sum += scores[ids[choice]];
        }
        sum += 1e-20f;
    }
    return rule.scale / sum;
}

// Returns the chosen groups of a row as bits. Lane `l` scores groups `l` and `l + WARP`.
template <class Score> __device__ inline u64 chosen_groups(const Routing& rule, u64 len, int lane, Score score) {
    float sums[GROUPS_MAX / WARP] = {};
    for (u64 group = lane; group < rule.num_groups; group += WARP) {
        Candidate best = {0.0f, NONE}, second = {0.0f, NONE};
        for (u64 member = group * len; member < (group + 1) * len; ++member) {
            Candidate own = {score(member), u32(member)};
            bool is_best = best.id == NONE || own.score > best.score;
            second = is_best ? best : better(second, own);
            best = is_best ? own : best;
        }
        sums[group / WARP] = best.score + (second.id == NONE ? 0.0f : second.score);
    }
    u64 chosen = 0;
    for (u64 choice = 0; choice < rule.num_chosen_groups; ++choice) {
        Candidate own = {0.0f, NONE};
        for (u64 group = lane; group < rule.num_groups; group += WARP) {
            if ((chosen >> group & 1) == 0) {
                own = better(own, {sums[group / WARP], u32(group)});
            }
        }
        chosen |= u64(1) << warp_best(own).id;
    }
    return chosen;
}

// A warp per row.
extern "C" __global__ void top_k(
    const float* x, u64 cols, Routing rule, const float* bias, const float* row_weights, float* values, u32* ids, u64 rows) {
    int lane = threadIdx.x % WARP;
    FOR_EACH_WARP_ITEM(row, rows) {
        const float* scores = x + row * cols;
        u32* own_ids = ids + row * rule.num_choices;
        float* own_values = values + row * rule.num_choices;
        if (row_weights && row_weights[row] == 0.0f) {
            for (u64 choice = lane; choice < rule.num_choices; choice += WARP) {
                own_ids[choice] = u32(cols);
                own_values[choice] = 0.0f;
            }
            continue;
        }
        auto score = [&](u64 id) { return bias ? scores[id] + bias[id] : scores[id]; };
        u64 len = rule.num_groups == 0 ? cols : cols / rule.num_groups;
        u64 groups = rule.num_groups == 0 ? 1 : chosen_groups(rule, len, lane, score);
        for (u64 choice = 0; choice < rule.num_choices; ++choice) {
            Candidate best = {0.0f, NONE};
            for (u64 id = lane; id < cols; id += WARP) {
                bool is_candidate = groups >> (id / len) & 1;
                for (u64 earlier = 0; earlier < choice && is_candidate; ++earlier) {
                    is_candidate = own_ids[earlier] != id;
                }
                if (is_candidate) {
                    best = better(best, {score(id), u32(id)});
                }
            }
            best = warp_best(best);
            if (lane == 0) {
                own_ids[choice] = best.id;
            }
            __syncwarp();
        }
        float sum, factor = weight_factor(rule, scores, own_ids, sum);
        for (u64 choice = lane; choice < rule.num_choices; choice += WARP) {
            own_values[choice] = scores[own_ids[choice]] * factor;
        }
    }
}

// A warp per row.
extern "C" __global__ void top_k_backward(
    const float* x, u64 cols, Routing rule, const u32* ids, const float* dy, float* dx, u64 rows) {
    int lane = threadIdx.x % WARP;
    FOR_EACH_WARP_ITEM(row, rows) {
        const float* scores = x + row * cols;
        const u32* own_ids = ids + row * rule.num_choices;
        const float* own_dy = dy + row * rule.num_choices;
        for (u64 col = lane; col < cols; col += WARP) {
            dx[row * cols + col] = 0.0f;
        }
        __syncwarp();
        if (own_ids[0] == cols) {
            continue;
        }
        float sum, factor = weight_factor(rule, scores, own_ids, sum), mean = 0.0f;
        if (rule.normalizes) {
            for (u64 choice = 0; choice < rule.num_choices; ++choice) {
                mean += own_dy[choice] * scores[own_ids[choice]];
            }
            mean /= sum;
        }
        for (u64 choice = lane; choice < rule.num_choices; choice += WARP) {
            dx[row * cols + own_ids[choice]] = (own_dy[choice] - mean) * factor;
        }
    }
}

// A block per expert. `is_excess` subtracts the mean over all experts.
extern "C" __global__ void expert_loads(const u32* ids, u64 num_ids, bool is_excess, bool accumulate, float* out, u64 num_experts) {
    FOR_EACH_ROW(expert, num_experts) {
        u32 own = 0, all = 0;
        for (u64 i = threadIdx.x; i < num_ids; i += BLOCK) {
            check(ids[i] <= num_experts);
            own += ids[i] == expert;
            all += ids[i] < num_experts;
        }
        own = block_sum(own);
        all = block_sum(all);
        if (threadIdx.x == 0) {
            float excess = is_excess ? float(own) - float(all) / float(num_experts) : float(own);
            out[expert] = accumulate ? out[expert] + excess : excess;
        }
    }
}

#define ROWS(X, Y)                                                                     \
    extern "C" __global__ void permute_rows_##X##_##Y(                                 \
        const X* x, u64 num_tokens, const u32* order, u64 num_choices, const float* weights, Y* y, u64 cols, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 choice = order[i / cols], token = choice / num_choices;                \
            check(token < num_tokens);                                                 \
            float weight = weights ? weights[choice] : 1.0f;                           \
            y[i] = from_f32<Y>(weight * to_f32(x[token * cols + i % cols]));           \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void combine_rows_##X##_##Y(                                 \
        const X* x, u64 num_rows, const u32* positions, u64 num_choices, const float* weights, const float* residual, \
        Y* y, u64 cols, u64 num) {                                                     \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u64 token = i / cols;                                                      \
            float sum = residual ? residual[i] : 0.0f;                                 \
            for (u64 choice = token * num_choices; choice < (token + 1) * num_choices; ++choice) { \
                check(positions[choice] < num_rows);                                   \
                float weight = weights ? weights[choice] : 1.0f;                       \
                sum += weight * to_f32(x[u64(positions[choice]) * cols + i % cols]);   \
            }                                                                          \
            y[i] = from_f32<Y>(sum);                                                   \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void row_products_##X##_##Y(                                 \
        const X* x, u64 num_rows, const u32* positions, u64 num_choices, const Y* y, float* products, u64 cols, u64 num) { \
        FOR_EACH_WARP_ITEM(choice, num) {                                              \
            check(positions[choice] < num_rows);                                       \
            const X* left = x + u64(positions[choice]) * cols;                         \
            const Y* right = y + choice / num_choices * cols;                          \
            float sum = 0.0f;                                                          \
            for (u64 col = threadIdx.x % WARP; col < cols; col += WARP) {              \
                sum = fmaf(to_f32(left[col]), to_f32(right[col]), sum);                \
            }                                                                          \
            sum = warp_reduce<Sum>(sum);                                               \
            if (threadIdx.x % WARP == 0) {                                             \
                products[choice] = sum;                                                \
            }                                                                          \
        }                                                                              \
    }
FOR_EACH_PAIR(ROWS)
