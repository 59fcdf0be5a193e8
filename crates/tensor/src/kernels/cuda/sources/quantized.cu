// Quantization to integers and to 8-bit floats.

#include "common.cuh"

// As in `kernels/cpu/quantized.rs`: bytes of a block's scale, the smallest largest magnitude of a block that does not become 0, and the
// number that rounds when it is added.
constexpr u32 SCALE_BYTES = 4;
constexpr float MAGNITUDE_MIN = 1e-36f, ROUNDER = 12582912.0f;
static_assert(BLOCK == 256, "a block of a message has an element per thread");

// Part of a message: a block of up to `BLOCK` elements, of 4 or 8 bits. Messages may begin at any byte.
struct Message {
    u32 len, num_codes;
    u64 first_byte;
};

__device__ inline Message message_block(u64 num, bool is_int4, u64 block) {
    u64 left = num - block * BLOCK;
    u32 len = u32(left < BLOCK ? left : BLOCK);
    u32 full_bytes = is_int4 ? BLOCK / 2 : BLOCK;
    return {len, is_int4 ? (len + 1) / 2 : len, block * (SCALE_BYTES + full_bytes)};
}

__device__ inline u8 code_of(float x, float inverse) {
    return u8(__float_as_uint(x * inverse + ROUNDER));
}

// A block per block of the message.
extern "C" __global__ void quantize(const float* x, bool is_int4, u8* message, u64 num, u64 num_blocks) {
    FOR_EACH_ROW(block, num_blocks) {
        Message own = message_block(num, is_int4, block);
        const float* from = x + block * BLOCK;
        u32 thread = threadIdx.x;
        u32 bits = block_max(thread < own.len ? __float_as_uint(from[thread]) & 0x7fffffff : 0);
        float magnitude = __uint_as_float(bits), levels = is_int4 ? 7.0f : 127.0f;
        bool is_finite = bits < 0x7f800000, is_zero = magnitude < MAGNITUDE_MIN;
        float scale = !is_finite ? __uint_as_float(0x7fc00000) : is_zero ? 0.0f : magnitude / levels;
        float inverse = !is_finite || is_zero ? 0.0f : levels / magnitude;
        u8* to = message + own.first_byte;
        if (thread == 0) {
            u32 bits = __float_as_uint(scale);
            for (u32 byte = 0; byte < SCALE_BYTES; ++byte) {
                to[byte] = u8(bits >> 8 * byte);
            }
        }
        if (thread < own.num_codes) {
            u8 code = code_of(from[thread], inverse);
            if (is_int4) {
                bool has_high = thread + own.num_codes < own.len;
                code = u8((code & 15) | (has_high ? code_of(from[thread + own.num_codes], inverse) << 4 : 0));
            }
            to[SCALE_BYTES + thread] = code;
        }
    }
}

// The value of an element of a message of `num`.
__device__ inline float message_value(const u8* message, bool is_int4, u64 num, u64 index) {
    Message own = message_block(num, is_int4, index / BLOCK);
    const u8* from = message + own.first_byte;
    u32 place = u32(index % BLOCK), scale = 0;
    for (u32 byte = 0; byte < SCALE_BYTES; ++byte) {
        scale |= u32(from[byte]) << 8 * byte;
    }
    bool is_high = place >= own.num_codes;
    u8 code = from[SCALE_BYTES + (is_high ? place - own.num_codes : place)];
    if (is_int4) {
        code = is_high ? code & 0xf0 : u8(code << 4);
    }
    int value = static_cast<signed char>(code);
    return float(is_int4 ? value >> 4 : value) * __uint_as_float(scale);
}

extern "C" __global__ void add_dequantized(const u8* message, bool is_int4, float* y, u64 num) {
    FOR_EACH_ELEMENT(i, num) {
        y[i] += message_value(message, is_int4, num, i);
    }
}

// A format of 8-bit floats and the exponent of a scale; `Rounding` in `kernels/cpu/fp8.rs`.
struct Fp8 {
    float max;
    u32 normal_min, rounder_offset;
    int exponent, margin, exponent_max;
};

__device__ inline float power_of_two(int exponent) {
    return __uint_as_float(u32(127 + exponent) << 23);
}

// The exponent of the scale, which is derived from the largest magnitude of the values if that is given.
__device__ inline int scale_exponent(const Fp8& format, const float* own_amax) {
    if (!own_amax) {
        return format.exponent;
    }
    double quotient = double(format.max) / double(*own_amax);
    int exponent = int(__double_as_longlong(quotient) >> 52) - 1023 - format.margin;
    return max(-format.exponent_max, min(exponent, format.exponent_max));
}

__device__ inline float rounded_to_fp8(const Fp8& format, float x, int exponent) {
    u32 scaled = __float_as_uint(x * power_of_two(exponent));
    float magnitude = __uint_as_float(scaled & 0x7fffffff);
    float saturated = magnitude > format.max ? format.max : magnitude;
    u32 power = max(__float_as_uint(saturated) & 0x7f800000u, format.normal_min);
    float rounder = __uint_as_float(power + format.rounder_offset);
    float rounded = (saturated + rounder) - rounder;
    return __uint_as_float(__float_as_uint(rounded) | (scaled & 0x80000000u)) * power_of_two(-exponent);
}

// Raises `amax` to the largest of the block's finite magnitudes. Bits of magnitudes are ordered like the values.
__device__ inline void raise(float* amax, u32 bits) {
    bits = block_max(bits);
    if (threadIdx.x == 0) {
        atomicMax(reinterpret_cast<u32*>(amax), bits);
    }
}

__device__ inline u32 finite_magnitude(float x) {
    u32 bits = __float_as_uint(x) & 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}

#define QUANTIZED(T)                                                                   \
    extern "C" __global__ void dequantize_##T(const u8* message, bool is_int4, T* y, u64 num) { \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            y[i] = from_f32<T>(message_value(message, is_int4, num, i));               \
        }                                                                              \
    }                                                                                  \
    extern "C" __global__ void fp8_amax_##T(const T* x, float* amax, u64 num) {        \
        u32 largest = 0;                                                               \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            largest = max(largest, finite_magnitude(to_f32(x[i])));                    \
        }                                                                              \
        raise(amax, largest);                                                          \
    }                                                                                  \
    extern "C" __global__ void quantize_fp8_##T(                                       \
        const T* x, Fp8 format, const float* own_amax, float* amax, Bf16* y, u64 num) { \
        int exponent = scale_exponent(format, own_amax);                               \
        u32 largest = 0;                                                               \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            float value = to_f32(x[i]);                                                \
            largest = max(largest, finite_magnitude(value));                           \
            y[i] = from_f32<Bf16>(rounded_to_fp8(format, value, exponent));            \
        }                                                                              \
        if (amax) {                                                                    \
            raise(amax, largest);                                                      \
        }                                                                              \
    }
FOR_EACH_FLOAT(QUANTIZED)
