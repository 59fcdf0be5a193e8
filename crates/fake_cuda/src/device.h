// The language of CUDA's kernels as C++ for the host. The fake NVRTC puts this text before the sources of kernels.
//
// One thread runs at a time, so atomic operations are ordinary ones. Threads are switched at barriers and at operations of a warp only.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

struct FakeIndex {
    unsigned x, y, z;
};

// What a thread knows of itself; `fake_cuda::block::Thread` in Rust.
struct FakeThread {
    FakeIndex thread, block, block_size, grid_size;
};

// Functions of the driver; `fake_cuda::block::Runtime` in Rust.
struct FakeRuntime {
    void (*barrier)();
    // Waits for the lanes of `mask`, and returns what each of the 32 lanes passed, `size` bytes each.
    const void* (*exchange)(unsigned mask, const void* own, size_t size);
    void* (*dynamic_shared)();
    void (*trap)();
};

static const FakeThread* fake_thread;
static const FakeRuntime* fake_runtime;

extern "C" void fake_attach(const FakeRuntime* runtime) {
    fake_runtime = runtime;
}

extern "C" void fake_switch(const FakeThread* thread) {
    fake_thread = thread;
}

#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Blocks run one after another.
#define __shared__ static
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(fake_runtime->dynamic_shared())

#define threadIdx (fake_thread->thread)
#define blockIdx (fake_thread->block)
#define blockDim (fake_thread->block_size)
#define gridDim (fake_thread->grid_size)
constexpr int warpSize = 32;

inline void __syncthreads() {
    fake_runtime->barrier();
}

inline void __trap() {
    fake_runtime->trap();
}

inline unsigned fake_lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    fake_runtime->exchange(mask, nullptr, 0);
}

template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const T* all = static_cast<const T*>(fake_runtime->exchange(mask, &value, sizeof value));
    unsigned own = fake_lane();
    return all[own / width * width + unsigned(lane) % width];
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const T* all = static_cast<const T*>(fake_runtime->exchange(mask, &value, sizeof value));
    unsigned own = fake_lane(), from = own ^ unsigned(lanes);
    return from / width == own / width ? all[from] : value;
}

template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const T* all = static_cast<const T*>(fake_runtime->exchange(mask, &value, sizeof value));
    unsigned own = fake_lane(), from = own + lanes;
    return from / width == own / width ? all[from] : value;
}

template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const T* all = static_cast<const T*>(fake_runtime->exchange(mask, &value, sizeof value));
    unsigned own = fake_lane();
    return own % width >= lanes ? all[own - lanes] : value;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    int own = predicate != 0;
    const int* all = static_cast<const int*>(fake_runtime->exchange(mask, &own, sizeof own));
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
        votes |= (mask >> lane & 1) && all[lane] ? 1u << lane : 0u;
    }
    return votes;
}

inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) == mask;
}

// The value of an element of 16 bits.
inline float fake_bf16(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline float fake_f16(uint16_t bits) {
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = float(fraction) * 0x1p-24f;
    if (exponent > 0) {
        // The exponent bias is 15 in f16 and 127 in f32.
        uint32_t word = (exponent == 31 ? 255 : exponent + 127 - 15) << 23 | fraction << 13;
        std::memcpy(&magnitude, &word, sizeof magnitude);
    }
    return bits >> 15 ? -magnitude : magnitude;
}

// Matrices as lanes hold them in `mma.sync.m16n8k16`: element `i` of a lane's operands, two per register.
template <float (*value)(uint16_t)> void fake_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct Operands {
        uint16_t a[8], b[4];
    } own;
    std::memcpy(own.a, a, sizeof a);
    std::memcpy(own.b, b, sizeof b);
    const Operands* all = static_cast<const Operands*>(fake_runtime->exchange(0xffffffffu, &own, sizeof own));
    unsigned lane = fake_lane();
    for (int element = 0; element < 4; ++element) {
        unsigned row = lane / 4 + element / 2 * 8, col = lane % 4 * 2 + element % 2;
        for (unsigned term = 0; term < 16; ++term) {
            const Operands &left = all[row % 8 * 4 + term % 8 / 2], &right = all[col * 4 + term % 8 / 2];
            float product = value(left.a[term / 8 * 4 + row / 8 * 2 + term % 2]) * value(right.b[term / 8 * 2 + term % 2]);
            d[element] += product;
        }
    }
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    fake_mma<fake_bf16>(d, a, b);
}

inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    fake_mma<fake_f16>(d, a, b);
}

// `ldmatrix.sync.m8n8.x4`: the addresses of rows are multiples of 16 bytes.
inline void fake_ldmatrix_x4(uint32_t (&words)[4], const void* row, bool is_transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        __trap();
    }
    struct Row {
        uint16_t elements[8];
    } own;
    std::memcpy(&own, row, sizeof own);
    const Row* all = static_cast<const Row*>(fake_runtime->exchange(0xffffffffu, &own, sizeof own));
    unsigned lane = fake_lane();
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (unsigned i = 0; i < 2; ++i) {
            unsigned place = lane % 4 * 2 + i;
            pair[i] = is_transposed ? all[matrix * 8 + place].elements[lane / 4] : all[matrix * 8 + lane / 4].elements[place];
        }
        std::memcpy(&words[matrix], pair, sizeof pair);
    }
}

inline void ldmatrix_x4(uint32_t (&words)[4], const void* row) {
    fake_ldmatrix_x4(words, row, false);
}

inline void ldmatrix_x4_trans(uint32_t (&words)[4], const void* row) {
    fake_ldmatrix_x4(words, row, true);
}

template <class T> T atomicAdd(T* address, T value) {
    static_assert(T(0.5) == T(0), "sums of floats depend on the order of threads");
    T old = *address;
    *address = old + value;
    return old;
}

template <class T> T atomicMax(T* address, T value) {
    T old = *address;
    *address = old < value ? value : old;
    return old;
}

template <class T> T atomicMin(T* address, T value) {
    T old = *address;
    *address = value < old ? value : old;
    return old;
}

template <class T> T atomicCAS(T* address, T expected, T value) {
    T old = *address;
    *address = old == expected ? value : old;
    return old;
}

inline void __threadfence() {}

template <class To, class From> To fake_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps them all");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __uint_as_float(unsigned bits) {
    return fake_cast<float>(bits);
}
inline unsigned __float_as_uint(float value) {
    return fake_cast<unsigned>(value);
}
inline float __int_as_float(int bits) {
    return fake_cast<float>(bits);
}
inline int __float_as_int(float value) {
    return fake_cast<int>(value);
}
inline double __longlong_as_double(long long bits) {
    return fake_cast<double>(bits);
}
inline long long __double_as_longlong(double value) {
    return fake_cast<long long>(value);
}
inline int __popc(unsigned value) {
    return __builtin_popcount(value);
}
inline int __popcll(unsigned long long value) {
    return __builtin_popcountll(value);
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz(unsigned(value));
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}
inline unsigned __umulhi(unsigned left, unsigned right) {
    return unsigned((static_cast<unsigned long long>(left) * right) >> 32);
}
inline float __fadd_rn(float left, float right) {
    return left + right;
}
inline float __fmul_rn(float left, float right) {
    return left * right;
}
inline float __fdiv_rn(float left, float right) {
    return left / right;
}
inline float __fsqrt_rn(float value) {
    return std::sqrt(value);
}
inline float rsqrtf(float value) {
    return 1.0f / std::sqrt(value);
}
template <class T> T __ldg(const T* address) {
    return *address;
}
template <class T> T min(T left, T right) {
    return right < left ? right : left;
}
template <class T> T max(T left, T right) {
    return left < right ? right : left;
}

// One kernel of a module, as `fake_cuda::module::Entry` in Rust reads it.
struct FakeEntry {
    const char* name;
    void (*call)(void* const* arguments);
    size_t num_arguments;
    const size_t* sizes;
};

template <auto kernel> struct FakeCall;

template <class... Arguments, void (*kernel)(Arguments...)> struct FakeCall<kernel> {
    static constexpr size_t sizes[sizeof...(Arguments) + 1] = {sizeof(Arguments)..., 0};

    template <size_t num, size_t... index> struct Count : Count<num - 1, num - 1, index...> {};
    template <size_t... index> struct Count<0, index...> {
        static void run(void* const* arguments) {
            kernel(*static_cast<Arguments*>(arguments[index])...);
        }
    };

    static void call(void* const* arguments) {
        Count<sizeof...(Arguments)>::run(arguments);
    }

    static constexpr FakeEntry entry(const char* name) {
        return {name, call, sizeof...(Arguments), sizes};
    }
};
