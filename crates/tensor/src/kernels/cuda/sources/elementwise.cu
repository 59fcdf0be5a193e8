// Elementwise kernels.

#include "common.cuh"

#define CONVERT(X, Y)                                                                  \
    extern "C" __global__ void convert_##X##_##Y(const X* x, Y* y, u64 num) {          \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            y[i] = from_f32<Y>(to_f32(x[i]));                                          \
        }                                                                              \
    }
FOR_EACH_PAIR(CONVERT)

#define ROUND(X, P)                                                                    \
    extern "C" __global__ void round_##X##_##P(const X* x, float* y, u64 num) {        \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            y[i] = to_f32(from_f32<P>(to_f32(x[i])));                                  \
        }                                                                              \
    }
FOR_EACH_PAIR(ROUND)

extern "C" __global__ void round_stochastically(const float* x, u32 seed, u64 position, Bf16* y, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        y[i] = stochastically_rounded(x[i], seed, position + i);
    }
}

// Sixteen bytes, which one instruction loads or stores.
struct alignas(16) StreamVector {
    u32 words[4];
};

// Numbers of vectors that `stream` updates, reads and writes. The three parts follow each other in memory.
struct StreamParts {
    u64 num_updated, num_read, num_written;
};

// Increments the updated vectors, loads those that are read, and stores those that are written.
extern "C" __global__ void stream(StreamVector* memory, StreamParts parts, u64 num) {
    const StreamVector* from = memory + parts.num_updated;
    StreamVector* to = memory + parts.num_updated + parts.num_read;
    u32 bits = 0;
    FOR_EACH_ELEMENT(i, num) {
        if (i < parts.num_updated) {
            StreamVector vector = memory[i];
            for (u32& word : vector.words) {
                word += 1;
            }
            memory[i] = vector;
        }
        StreamVector vector = {};
        if (i < parts.num_read) {
            vector = from[i];
        }
        if (i < parts.num_written) {
            to[i] = vector;
        }
        for (u32 word : vector.words) {
            bits |= word;
        }
    }
    // Without a use of the bits, the compiler would omit the loads.
    if (bits == 0x9e3779b9) {
        memory[0].words[0] = bits;
    }
}

// Keeps the stream busy: each round depends on the one before. `unused` is null.
extern "C" __global__ void delay(u64 num_rounds, float* unused) {
    float value = 0.0f;
    for (u64 round = 0; threadIdx.x == 0 && round < num_rounds; round++) {
        value = value * 0.5f + 1.0f;
    }
    // Without a use of the value, the compiler would omit the loop. It is at most 2.
    if (value > 3.0f) {
        *unused = value;
    }
}

#define ADD_ASSIGN(T)                                                                  \
    extern "C" __global__ void add_assign_##T(T* out, const T* term, u64 num) {        \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            out[i] = from_f32<T>(to_f32(out[i]) + to_f32(term[i]));                    \
        }                                                                              \
    }
FOR_EACH_FLOAT(ADD_ASSIGN)

#define ADD_BIAS(X, Y)                                                                 \
    extern "C" __global__ void add_bias_##X##_##Y(                                     \
        const X* x, const float* bias, const float* residual, Y* y, u64 cols, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            float value = to_f32(x[i]);                                                \
            value = bias ? value + bias[i % cols] : value;                             \
            value = residual ? value + residual[i] : value;                            \
            y[i] = from_f32<Y>(value);                                                 \
        }                                                                              \
    }
FOR_EACH_PAIR(ADD_BIAS)

#define DROPOUT(T)                                                                     \
    extern "C" __global__ void dropout_##T(                                            \
        T* x, RandomKey key, u64 first, u64 len, u64 stride, u32 threshold, float scale, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            u32 word = random_word(key, first + i / len * stride + i % len);           \
            x[i] = from_f32<T>(word < threshold ? 0.0f : to_f32(x[i]) * scale);        \
        }                                                                              \
    }
FOR_EACH_FLOAT(DROPOUT)

// The value and the derivative of an activation.
struct Point {
    float value, slope;
};

// As `Activation` in Rust.
enum Activation { GELU, EXACT_GELU, SILU };

__device__ inline Point gelu(float x) {
    const float scale = 0.7978846f, cubic = 0.044715f;
    // Clamped far beyond the values at which the sigmoid rounds to 0 or 1, because an infinite square would make the slope NaN.
    float square = x * x;
    square = square > 1e4f ? 1e4f : square;
    float s = sigmoid(2.0f * scale * x * (1.0f + cubic * square));
    float slope = 2.0f * scale * (1.0f + 3.0f * cubic * square);
    return {x * s, s + x * s * (1.0f - s) * slope};
}

__device__ inline Point exact_gelu(float x) {
    const float root_of_half = 0.70710678f, root_of_density = 0.3989423f;
    float tail = 0.5f * erfcf(fabsf(x) * root_of_half);
    float distribution = x < 0.0f ? tail : 1.0f - tail;
    // NaN is kept.
    float bell = expf(-0.5f * x * x);
    return {x * distribution, distribution + x * (root_of_density * bell)};
}

__device__ inline Point silu(float x) {
    float s = sigmoid(x), y = x * s;
    return {y, s + y * (1.0f - s)};
}

__device__ inline Point activation_at(int activation, float x) {
    return activation == GELU ? gelu(x) : activation == EXACT_GELU ? exact_gelu(x) : silu(x);
}

#define ACTIVATE(T)                                                                    \
    extern "C" __global__ void activate_##T(u32 activation, const T* x, T* y, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            y[i] = from_f32<T>(activation_at(activation, to_f32(x[i])).value);         \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void activate_backward_##T(u32 activation, T* x, T* dy, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            Point at = activation_at(activation, to_f32(x[i]));                        \
            x[i] = from_f32<T>(at.value);                                              \
            dy[i] = from_f32<T>(to_f32(dy[i]) * at.slope);                             \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void gate_##T(u32 activation, const T* gate_up, T* y, u64 cols, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            const T* gate = gate_up + (i + i / cols * cols);                           \
            y[i] = from_f32<T>(activation_at(activation, to_f32(gate[0])).value * to_f32(gate[cols])); \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void gate_backward_##T(u32 activation, T* gate_up, T* dy, u64 cols, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            T* gate = gate_up + (i + i / cols * cols);                                 \
            float up = to_f32(gate[cols]), d_value = to_f32(dy[i]);                    \
            Point at = activation_at(activation, to_f32(gate[0]));                     \
            dy[i] = from_f32<T>(at.value * up);                                        \
            gate[0] = from_f32<T>(d_value * up * at.slope);                            \
            gate[cols] = from_f32<T>(d_value * at.value);                              \
        }                                                                              \
    }
FOR_EACH_FLOAT(ACTIVATE)
