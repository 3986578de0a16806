// Vectors of numbers, by the vector extension of GCC and Clang, and the exponential function on them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1
#else
#define MANY_REGISTERS 0
#endif

namespace {

template <class T> struct Of;
template <> struct Of<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Int;
    static constexpr int exponent_bits = 23, terms = 7;
    static constexpr float least = -87.0f, magic = 12582912.0f, high = 0.693145751953125f, low = 1.42860682030941723212e-6f;
};
template <> struct Of<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Int;
    static constexpr int exponent_bits = 52, terms = 13;
    static constexpr double least = -700.0, magic = 6755399441055744.0, high = 6.93147180369123816490e-01,
                            low = 1.90821492927058770002e-10;
};

template <class T> constexpr int VL = VECTOR_BYTES / sizeof(T);

template <class T> inline typename Of<T>::V load(const T* p) {
    typename Of<T>::V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T> inline typename Of<T>::I load_indices(const typename Of<T>::Int* p) {
    typename Of<T>::I v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T> inline void store(T* p, typename Of<T>::V v) { std::memcpy(p, &v, sizeof v); }
template <class T> inline typename Of<T>::V all(T x) { return x - (typename Of<T>::V){}; }

// exp(x) for x <= about 1; 0 below `least`, what is no number stays so
template <class T>
__attribute__((always_inline)) inline typename Of<T>::V exponential(typename Of<T>::V x) {
    using O = Of<T>;
    using V = typename O::V;
    using I = typename O::I;
    const V least = all<T>(O::least);
    I dead = x < least;
    x = dead ? least : x;
    V shifted = x * (T)1.44269504088896340736 + O::magic;
    V n = shifted - O::magic;
    V r = x - n * O::high;
    r = r - n * O::low;
    T factorial = 1;
    T coefficient[O::terms + 1];
    coefficient[0] = 1;
    for (int i = 1; i <= O::terms; ++i) coefficient[i] = 1 / (factorial *= i);
    V y = all<T>(coefficient[O::terms]);
#pragma GCC unroll 16
    for (int i = O::terms - 1; i >= 0; --i) y = y * r + coefficient[i];
    I bits = ((I)shifted) << O::exponent_bits;  // the low bits of `shifted` are n
    y = (V)((I)y + bits);
    return dead ? (V){} : x == x ? y : x;
}
}  // namespace
