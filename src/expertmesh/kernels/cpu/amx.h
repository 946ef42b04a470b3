/* Tiles of AMX: their shape, and how rows become tiles. */
#ifndef EXPERTMESH_AMX_H
#define EXPERTMESH_AMX_H

#include "vectors.h"

#if defined(__AMX_BF16__)

#define TILE_BYTES 1024

static inline void configure_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}

/* The compiler does not know that a tile reads memory. */
#define MEMORY_IS_WRITTEN __asm__ volatile("" ::: "memory")

/* Transposes 16 by 16 numbers of 4 bytes. */
static inline void transpose(__m512i v[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {
        __m512i ab = _mm512_unpacklo_epi32(v[i], v[i + 1]), AB = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        __m512i cd = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), CD = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm512_unpacklo_epi64(ab, cd), t[i + 1] = _mm512_unpackhi_epi64(ab, cd);
        t[i + 2] = _mm512_unpacklo_epi64(AB, CD), t[i + 3] = _mm512_unpackhi_epi64(AB, CD);
    }
    for (int i = 0; i < 4; i++) { /* t[i + 4 j]: of rows 4 j to 4 j + 3, columns i, i + 4, i + 8, i + 12 */
        __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        __m512i c = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd), d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        v[i] = _mm512_shuffle_i32x4(a, b, 0x88), v[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88), v[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

/* Two vectors of floats become one of pairs, rounded to BF16: (low, high) of each lane. */
static inline __m512i paired(Floats low, Floats high) {
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

#endif
#endif
