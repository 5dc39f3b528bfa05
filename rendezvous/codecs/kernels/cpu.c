/* One piece of a codec in one pass over memory.      x, e ─▶ s = x + e ─▶ rows,  e ← s − unpack(rows),  ‖x‖²
                                                      rows ─▶ v ─▶ total ← fl(total + fl(w·v))
                                              many rows ─▶ mean ─▶ rows of the mean ─▶ what they say
   The arithmetic is that of rows.py, rounding by rounding; compile with -ffp-contract=off.
   Each function returns 0, or 1 for what encode must refuse and for rows that no encoder wrote. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EXPORT __attribute__((target_clones("avx2", "default")))
#else
#define EXPORT
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define TINY 0x1p-126f
#define INF_BITS 0x7F800000
#define STEP 1024
#define LANES 32 /* as many elements as one turn of a loop takes: 128 bytes of fp32, so nothing is asked for twice */
#define AHEAD 4096 /* bytes: the hardware fetches ahead by itself, but not over the end of a page */

INLINE void soon(const void *p, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)((uintptr_t)p + AHEAD + i));
}

INLINE float to_even(float v) { return (v + 12582912.0f) - 12582912.0f; } /* |v| < 2^22 */

INLINE int32_t magnitude(float v) {
    int32_t bits;
    memcpy(&bits, &v, 4);
    return bits & 0x7FFFFFFF;
}

INLINE int32_t peak(const float *v, long n) { /* as bits, in whose order NaN is above infinity */
    int32_t most = 0;
    for (long i = 0; i < n; i++) most = magnitude(v[i]) > most ? magnitude(v[i]) : most;
    return most;
}

INLINE int32_t sum(float *restrict s, const float *restrict x, const float *restrict e, long n) {
    int32_t most[LANES] = {0}, all = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        soon(x + i, 4 * LANES);
        if (e) soon(e + i, 4 * LANES);
        for (int j = 0; j < LANES; j++) {
            s[i + j] = e ? e[i + j] + x[i + j] : x[i + j];
            most[j] = magnitude(s[i + j]) > most[j] ? magnitude(s[i + j]) : most[j];
        }
    }
    for (; i < n; i++) {
        s[i] = e ? e[i] + x[i] : x[i];
        all = magnitude(s[i]) > all ? magnitude(s[i]) : all;
    }
    for (int j = 0; j < LANES; j++) all = most[j] > all ? most[j] : all;
    return all;
}

INLINE double squares(const float *x, long n) { /* of what is in the first cache; told to people, so not exact */
    float lanes[16] = {0};
    double all = 0;
    long i = 0;
    for (; i + 16 <= n; i += 16) for (int j = 0; j < 16; j++) lanes[j] += x[i + j] * x[i + j];
    for (int j = 0; j < 16; j++) all += lanes[j];
    for (; i < n; i++) all += x[i] * x[i];
    return all;
}

INLINE int keep(float *e, const float *s, long n) { /* shows the caller what was not finite */
    if (e) memcpy(e, s, 4 * n);
    return 1;
}

INLINE void put(float *total, const float *v, float w, int first, long n) {
    if (first) for (long i = 0; i < n; i++) total[i] = w * v[i];
    else for (long i = 0; i < n; i++) total[i] += w * v[i];
}

/* past the caches: what is written here is long, and read much later */
INLINE void stream(void *out, const void *v, long bytes) {
    long i = 0;
#ifdef __SSE2__
    if (((uintptr_t)out & 15) == 0) for (; i + 16 <= bytes; i += 16)
        _mm_stream_si128((__m128i *)((char *)out + i), _mm_loadu_si128((const __m128i *)((const char *)v + i)));
#endif
    memcpy((char *)out + i, (const char *)v + i, bytes - i);
}

INLINE void fence(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

INLINE float scale_of(int32_t peak_bits, int levels, float most) {
    float scale;
    memcpy(&scale, &peak_bits, 4);
    scale /= (float)levels;
    return scale < TINY ? TINY : scale > most ? most : scale;
}

/* row <- s;  left <- what it lacks;  said <- what it says, but for signs of 0.   Both may be null; said may be s */
INLINE void code_row(const float *s, float *left, float *said, uint8_t *restrict row, float scale, int block,
                     int levels) {
    float inverse = 1.0f / scale;
    int8_t *restrict to = (int8_t *)row + 4;
    memcpy(row, &scale, 4);
    if (levels == 127) for (int i = 0; i < block; i++) {
        float code = to_even(s[i] * inverse);
        to[i] = (int8_t)(int32_t)code;
        if (left) left[i] = s[i] - code * scale;
        if (said) said[i] = code * scale;
    }
    else for (int i = 0, j = block / 2; i < block / 2; i++, j++) {
        float low = to_even(s[i] * inverse), high = to_even(s[j] * inverse);
        to[i] = (int8_t)((int32_t)low + 16 * (int32_t)high);
        if (left) left[i] = s[i] - low * scale, left[j] = s[j] - high * scale;
        if (said) said[i] = low * scale, said[j] = high * scale;
    }
}

INLINE int encode_row(const float *x, float *restrict e, uint8_t *restrict row, long n, int block, int levels,
                      float most) {
    float s[STEP], rest[STEP], *left = n == block && e ? e : rest;
    int32_t bits = sum(s, x, e, n);
    if (bits >= INF_BITS) return keep(e, s, n);
    memset(s + n, 0, 4 * (block - n));
    code_row(s, e ? left : 0, 0, row, scale_of(bits, levels, most), block, levels);
    if (left == rest) keep(e, rest, n);
    return 0;
}

INLINE void put_row(const int8_t *code, float scale, float w, float *restrict total, int first, int block,
                    int levels) {
    if (levels == 127) for (int i = 0; i < block; i++) {
        float v = w * ((float)code[i] * scale);
        total[i] = first ? v : total[i] + v;
    }
    else for (int i = 0, j = block / 2; i < block / 2; i++, j++) {
        int low = ((code[i] + 8) & 15) - 8;
        float v = w * ((float)low * scale), u = w * ((float)((code[i] - low) >> 4) * scale);
        total[i] = first ? v : total[i] + v;
        total[j] = first ? u : total[j] + u;
    }
}

INLINE int add_row(const uint8_t *row, float w, float *total, int first, long n, int block, int levels, float most) {
    float v[STEP], scale;
    memcpy(&scale, row, 4);
    if (!(scale >= TINY && scale <= most)) return 1;
    if (n == block && scale <= 0x1p100f) {
        put_row((const int8_t *)row + 4, scale, w, total, first, block, levels);
        return 0;
    }
    put_row((const int8_t *)row + 4, scale, 1, v, 1, block, levels);
    if (peak(v, block) >= INF_BITS || (n < block && peak(v + n, block - n))) return 1;
    put(total, v, w, first, n);
    return 0;
}

#define BLOCKS(name, block, levels, row_bytes)                                                                    \
    EXPORT int encode_##name(const float *x, float *e, uint8_t *rows, long n, float most, double *square) {       \
        int bad = 0;                                                                                              \
        long i = 0;                                                                                               \
        for (; i + block <= n && !bad; i += block, rows += row_bytes) {                                           \
            bad = encode_row(x + i, e ? e + i : 0, rows, block, block, levels, most);                             \
            *square += squares(x + i, block);                                                                     \
        }                                                                                                         \
        *square += squares(x + i, bad ? 0 : n - i);                                                               \
        return bad || (i < n && encode_row(x + i, e ? e + i : 0, rows, n - i, block, levels, most));              \
    }                                                                                                             \
    EXPORT int add_##name(const uint8_t *rows, float w, float *total, int first, long n, float most) {            \
        int bad = 0;                                                                                              \
        long i = 0;                                                                                               \
        for (float t[STEP]; first && i + block <= n && !bad; i += block, rows += row_bytes) {                     \
            bad = add_row(rows, w, t, 1, block, block, levels, most);                                             \
            stream(total + i, t, 4 * block);                                                                      \
        }                                                                                                         \
        fence();                                                                                                  \
        for (; i + block <= n && !bad; i += block, rows += row_bytes)                                             \
            bad = add_row(rows, w, total + i, first, block, block, levels, most);                                 \
        return bad || (i < n && add_row(rows, w, total + i, first, n - i, block, levels, most));                  \
    }

BLOCKS(int8, 1024, 127, 1028)
BLOCKS(int4, 512, 7, 260)

INLINE float wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

INLINE uint16_t narrow(float v) { /* to nearest even, no infinities */
    uint32_t bits;
    memcpy(&bits, &v, 4);
    int32_t size = (int32_t)((bits & 0x7FFFFFFF) + 0x7FFF + (bits >> 16 & 1));
    if (size > 0x7F7FFFFF) size = 0x7F7FFFFF;
    return (uint16_t)(((bits & 0x80000000) | (uint32_t)size) >> 16);
}

/* one element;  -> its magnitude */
INLINE int32_t narrow_one(const float *restrict x, float *restrict e, uint16_t *half, float *square) {
    float s = e ? *e + *x : *x;
    *half = narrow(s);
    *square += *x * *x;
    if (e) *e = s - wide(*half); /* not finite where s is not */
    return magnitude(s);
}

INLINE int narrow_all(const float *restrict x, float *restrict e, uint8_t *rows, long n, int feedback,
                      double *square) {
    int32_t most[LANES] = {0}, m;
    long i = 0;
    while (i + LANES <= n) {
        float squares[LANES] = {0};
        for (long end = i + STEP; i + LANES <= n && i < end; i += LANES) {
            uint16_t halves[LANES];
            soon(x + i, 4 * LANES);
            if (feedback) soon(e + i, 4 * LANES);
            for (int j = 0; j < LANES; j++) {
                m = narrow_one(x + i + j, feedback ? e + i + j : 0, halves + j, squares + j);
                most[j] = m > most[j] ? m : most[j];
            }
            stream(rows + 2 * i, halves, 2 * LANES);
        }
        for (int j = 0; j < LANES; j++) *square += squares[j];
    }
    for (; i < n; i++) {
        uint16_t half;
        float one = 0;
        m = narrow_one(x + i, feedback ? e + i : 0, &half, &one);
        most[0] = m > most[0] ? m : most[0];
        memcpy(rows + 2 * i, &half, 2);
        *square += one;
    }
    fence();
    for (int j = 1; j < LANES; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
    return most[0] >= INF_BITS;
}

INLINE int widen(const uint8_t *restrict rows, float w, float *restrict total, long n, int first) {
    int32_t most = 0;
    for (long i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, rows + 2 * i, 2);
        float v = wide(half);
        most = magnitude(v) > most ? magnitude(v) : most;
        total[i] = first ? w * v : total[i] + w * v;
    }
    return most >= INF_BITS;
}

EXPORT int encode_bf16(const float *x, float *e, uint8_t *rows, long n, float most, double *square) {
    (void)most;
    return e ? narrow_all(x, e, rows, n, 1, square) : narrow_all(x, 0, rows, n, 0, square);
}

EXPORT int add_bf16(const uint8_t *rows, float w, float *total, int first, long n, float most) {
    (void)most;
    return first ? widen(rows, w, total, n, 1) : widen(rows, w, total, n, 0);
}

/* out = (fl(w0·v0) + fl(w1·v1) + …) / weight, row by row in the first cache;  1 if some of it is not finite, or no
   encoder wrote it.   rows: not null: where the mean is packed; then out is what these rows say */
INLINE int32_t divided(float *t, float weight, long n) { /* -> its peak, as bits */
    int32_t most = 0, bits;
    memcpy(&bits, &weight, 4);
    float inverse = 1.0f / weight;
    int exact = !(bits & 0x7FFFFF) && weight >= 0x1p-60f && weight <= 0x1p60f; /* then both are the same number */
    for (long i = 0; i < n; i++) {
        float v = exact ? t[i] * inverse : t[i] / weight;
        int32_t m = magnitude(v);
        t[i] = v;
        most = m > most ? m : most;
    }
    return most;
}

INLINE void repack(float *t, uint8_t *row, long n, int32_t bits, int block, int levels, float most) {
    memset(t + n, 0, 4 * (block - n));
    code_row(t, 0, t, row, scale_of(bits, levels, most), block, levels);
    for (int i = 0; i < block; i++) t[i] += 0.0f; /* a byte has no sign where it is 0 */
}

INLINE void repack_bf16(float *v, uint8_t *row, long n) {
    for (long i = 0; i < n; i++) {
        uint16_t half = narrow(v[i]);
        memcpy(row + 2 * i, &half, 2);
        v[i] = wide(half);
    }
}

#define MEAN(name, block, row_bytes, add, repack_it)                                                              \
    EXPORT int mean_##name(const uint8_t *const *bodies, const float *w, long count, float weight, float *out,    \
                           long n, float most, uint8_t *rows) {                                                   \
        int bad = 0;                                                                                              \
        for (long i = 0; i < n && !bad; i += block) {                                                             \
            long m = n - i < block ? n - i : block, at = i / block * (row_bytes);                                 \
            float t[STEP];                                                                                        \
            for (long j = 0; j < count && !bad; j++) {                                                            \
                const uint8_t *row = bodies[j] + at;                                                              \
                bad = add;                                                                                        \
            }                                                                                                     \
            int32_t bits = bad ? 0 : divided(t, weight, m);                                                       \
            bad = bad || bits >= INF_BITS;                                                                        \
            if (rows && !bad) repack_it;                                                                          \
            stream(out + i, t, 4 * m);                                                                            \
        }                                                                                                         \
        fence();                                                                                                  \
        (void)most;                                                                                               \
        return bad;                                                                                               \
    }

INLINE int add_plain(const float *x, float w, float *total, int first, long n) {
    put(total, x, w, first, n);
    return 0;
}

MEAN(fp32, STEP, 4 * STEP, add_plain((const float *)row, w[j], t, j == 0, m), bad = 1)
MEAN(bf16, STEP, 2 * STEP, j ? widen(row, w[j], t, m, 0) : widen(row, w[j], t, m, 1), repack_bf16(t, rows + at, m))
MEAN(int8, 1024, 1028, add_row(row, w[j], t, j == 0, m, 1024, 127, most),
     repack(t, rows + at, m, bits, 1024, 127, most))
MEAN(int4, 512, 260, add_row(row, w[j], t, j == 0, m, 512, 7, most),
     repack(t, rows + at, m, bits, 512, 7, most))
