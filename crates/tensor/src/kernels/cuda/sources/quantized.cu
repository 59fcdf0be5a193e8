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

// An fp8 format and its scale, as written by `Argument for Fp8Scale` in `run/quantized.rs`.
struct Fp8 {
    float max;
    u32 fraction_bits;
    int exponent, margin, exponent_max, padding;
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

// The exponent of the smallest normal value.
__device__ inline int exponent_min(u32 fraction_bits) {
    return 2 - (1 << (6 - fraction_bits));
}

// The nearest code, ties to even. Values beyond the range saturate; NaN stays NaN.
__device__ inline u8 fp8_code(const Fp8& format, float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return u8(sign | 0x7f);
    }
    u32 saturated = min(magnitude, __float_as_uint(format.max)), shift = 23 - format.fraction_bits;
    u32 normal_min = u32(127 + exponent_min(format.fraction_bits)) << 23;
    u32 power = max(saturated & 0x7f800000u, normal_min);
    // `rounder` is so large that its unit in the last place is that of the format at `power`. The sum is therefore rounded to the format,
    // and its last bits are the fraction. The leading one of a normal value adds 1 to the exponent of the code.
    u32 rounder = power + (shift << 23);
    u32 fraction = __float_as_uint(__uint_as_float(saturated) + __uint_as_float(rounder)) - rounder;
    return u8(sign | (((power - normal_min) >> shift) + fraction));
}

// The value of a code of `fp8_code`.
__device__ inline float fp8_value(u32 fraction_bits, u8 code) {
    u32 sign = u32(code & 0x80) << 24, magnitude = code & 0x7f;
    int first = exponent_min(fraction_bits);
    float value = magnitude >> fraction_bits == 0
        ? float(magnitude) * power_of_two(first - int(fraction_bits))
        : __uint_as_float((magnitude << (23 - fraction_bits)) + (u32(126 + first) << 23));
    return __uint_as_float(sign | (magnitude == 0x7f ? 0x7fc00000 : __float_as_uint(value)));
}

extern "C" __global__ void dequantize_fp8(
    const u8* codes, const float* reciprocal, u32 fraction_bits, Bf16* y, u64 num) {
    float factor = *reciprocal;
    FOR_EACH_ELEMENT(i, num) {
        y[i] = from_f32<Bf16>(fp8_value(fraction_bits, codes[i]) * factor);
    }
}

// Side of the square tiles of a transposition, and the words of a row of a tile.
constexpr u32 TRANSPOSE_TILE = 64, TILE_WORDS = TRANSPOSE_TILE / 4;

// Transposes a matrix of bytes, a block per tile. Dims are multiples of 4, and `x` and `y` are aligned to 4 bytes.
extern "C" __global__ void transpose_codes(const u8* x, u8* y, u64 rows, u64 cols, u64 num_tiles) {
    // A word more per row avoids bank conflicts when columns are read.
    __shared__ u32 tile[TRANSPOSE_TILE][TILE_WORDS + 1];
    u64 tiles_per_row = (cols + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    u32 word = threadIdx.x % TILE_WORDS, first_line = threadIdx.x / TILE_WORDS;
    FOR_EACH_ROW(index, num_tiles) {
        u64 first_row = index / tiles_per_row * TRANSPOSE_TILE, first_col = index % tiles_per_row * TRANSPOSE_TILE;
        for (u32 line = first_line; line < TRANSPOSE_TILE; line += BLOCK / TILE_WORDS) {
            u64 row = first_row + line, col = first_col + 4 * word;
            if (row < rows && col < cols) {
                tile[line][word] = *reinterpret_cast<const u32*>(x + row * cols + col);
            }
        }
        __syncthreads();
        for (u32 line = first_line; line < TRANSPOSE_TILE; line += BLOCK / TILE_WORDS) {
            u64 row = first_row + 4 * word, col = first_col + line;
            if (row < rows && col < cols) {
                u32 codes = 0;
                for (u32 byte = 0; byte < 4; ++byte) {
                    codes |= (tile[4 * word + byte][line / 4] >> 8 * (line % 4) & 0xff) << 8 * byte;
                }
                *reinterpret_cast<u32*>(y + col * rows + row) = codes;
            }
        }
        __syncthreads();
    }
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
        const T* x, Fp8 format, const float* own_amax, float* amax, float* reciprocal, u8* codes, u64 num) { \
        int exponent = scale_exponent(format, own_amax);                               \
        float scale = power_of_two(exponent);                                          \
        if (first_element() == 0) {                                                    \
            *reciprocal = power_of_two(-exponent);                                     \
        }                                                                              \
        u32 largest = 0;                                                               \
        FOR_EACH_ELEMENT(i, num) {                                                     \
            float value = to_f32(x[i]);                                                \
            largest = max(largest, finite_magnitude(value));                           \
            codes[i] = fp8_code(format, value * scale);                                \
        }                                                                              \
        if (amax) {                                                                    \
            raise(amax, largest);                                                      \
        }                                                                              \
    }
FOR_EACH_FLOAT(QUANTIZED)
