/* One AdamW update with 8-bit moments: the loop of reference.py, one group of 256 elements at a time in the L1 cache.
 *
 * Every select is written so that the compiler vectorises it; the arithmetic of the 8-bit map is explained in
 * dynamic_map.py. borders: 8 floats of the signed map, then 8 of the unsigned one.
 * hyper: lr, beta1, beta2, eps, weight_decay, 1 - beta1^t, sqrt(1 - beta2^t), unused.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GROUP 256
#define DECADES 7
#define LANES 16

#define FOR_EACH_DECADE(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6)

static const float POW2[DECADES] = {1, 2, 4, 8, 16, 32, 64};
static const float POW5[DECADES] = {1, 5, 25, 125, 625, 3125, 15625};

static inline __attribute__((always_inline)) void
dequantize(const uint8_t *restrict codes, float scale, int is_signed, float *restrict out)
{
    const float cells = is_signed ? 1.0f : 2.0f;
    const float unit = 0.9f / cells * 1e-6f * scale;
    for (int i = 0; i < GROUP; i++) {
        const float code = (float)codes[i];
        const float index = is_signed ? fabsf(code - 127.0f) : code;
        /* (index - first index) / cells + 1 lies in [2^d, 2^(d+1)) for decade d: its exponent is d. */
        const float position = index * (1.0f / cells) + (1.0f - 1.0f / cells);
        uint32_t bits;
        memcpy(&bits, &position, sizeof bits);
        const uint32_t decade = (bits >> 23) - 127u;
        const uint32_t power_bits = bits & 0xff800000u;
        float power;
        memcpy(&power, &power_bits, sizeof power);
        const float low = (decade & 1u ? 5.0f : 1.0f) * (decade & 2u ? 25.0f : 1.0f);
        const float width = low * (decade & 4u ? 625.0f * unit : unit);
        float value = (index + (cells - 0.5f) + power * (cells / 9.0f - cells)) * width;
        value = index > 127.0f * cells ? scale : value;
        value = index < 1.0f ? 0.0f : value;
        out[i] = is_signed ? copysignf(value, code - 127.0f) : value;
    }
}

static inline __attribute__((always_inline)) float
quantize(const float *restrict values, const float *restrict borders, int is_signed, uint8_t *restrict codes)
{
    const float cells = is_signed ? 1.0f : 2.0f;
    float lane_max[LANES] = {0};
    for (int i = 0; i < GROUP; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float magnitude = fabsf(values[i + j]);
            lane_max[j] = magnitude > lane_max[j] ? magnitude : lane_max[j];
        }
    float scale = 0.0f;
    for (int j = 0; j < LANES; j++)
        scale = lane_max[j] > scale ? lane_max[j] : scale;
    const float inverse = 1.0f / (scale > 1.17549435e-38f ? scale : 1.17549435e-38f);
    for (int i = 0; i < GROUP; i++) {
        const float magnitude = fabsf(values[i]) * inverse;
        float power = 0.0f, slope = 0.0f;
#define STEP(d)                                                                  \
    {                                                                            \
        const int above = magnitude >= borders[d];                               \
        power = above ? POW2[d] : power;                                         \
        slope = above ? cells / 0.9f * 1e6f / POW5[d] : slope; \
    }
        FOR_EACH_DECADE(STEP)
#undef STEP
        const float first = (1.0f - cells) + cells * power;
        const float last = first + (cells * power - 1.0f);
        float index = (float)(int)((1.0f - cells) + power * (cells - cells / 9.0f) + magnitude * slope);
        index = index > first ? index : first;
        index = index < last ? index : last;
        index = power > 0.0f ? index : 0.0f;
        index += magnitude >= borders[DECADES] ? 1.0f : 0.0f;
        if (is_signed) {
            const float below = 127.0f - (index < 127.0f ? index : 127.0f);
            const float above = 127.0f + index;
            index = values[i] < 0.0f ? below : above;
        }
        codes[i] = (uint8_t)(int)index;
    }
    return scale;
}

static inline __attribute__((always_inline)) void load_bfloat16(const uint16_t *restrict in, float *restrict out)
{
    for (int i = 0; i < GROUP; i++) {
        const uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

void adamw_int8(float *param, const void *grad, int grad_is_bfloat16, uint8_t *m_codes, float *m_scale,
                uint8_t *v_codes, float *v_scale, int64_t groups, const float *borders, const float *hyper)
{
    const float lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], eps = hyper[3];
    const float decay = 1.0f - lr * hyper[4], step_size = lr / hyper[5], inverse_root = 1.0f / hyper[6];
#pragma omp parallel for schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        float m[GROUP], v[GROUP], wide[GROUP];
        const float *gradient = (const float *)grad + g * GROUP;
        if (grad_is_bfloat16) {
            load_bfloat16((const uint16_t *)grad + g * GROUP, wide);
            gradient = wide;
        }
        dequantize(m_codes + g * GROUP, m_scale[g], 1, m);
        dequantize(v_codes + g * GROUP, v_scale[g], 0, v);
        float *restrict p = param + g * GROUP;
        for (int i = 0; i < GROUP; i++) {
            m[i] = beta1 * m[i] + (1.0f - beta1) * gradient[i];
            v[i] = beta2 * v[i] + (1.0f - beta2) * gradient[i] * gradient[i];
            p[i] = p[i] * decay - step_size * m[i] / (sqrtf(v[i]) * inverse_root + eps);
        }
        m_scale[g] = quantize(m, borders, 1, m_codes + g * GROUP);
        v_scale[g] = quantize(v, borders + DECADES + 1, 0, v_codes + g * GROUP);
    }
}
