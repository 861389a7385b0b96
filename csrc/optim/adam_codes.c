#include "optim/update.h"

#include <math.h>

#include "../kernels/adam_codes.cuh"
#include "optim/element.h"

void mo_code_decode(unsigned bits, bool second, const uint8_t *codes, const float *scales, size_t count,
                    float *out)
{
    for (size_t i = 0; i < count; i++) {
        const float scale = scales[i / MO_CODE_BLOCK];
        const unsigned code = mo_element_code(bits, codes, i);
        out[i] = second ? mo_code_decode_v(bits, code, mo_code_unit_v(bits, scale))
                        : mo_code_decode_m(bits, code, mo_code_unit_m(bits, scale));
    }
}

void mo_code_encode(unsigned bits, bool second, const float *values, size_t count, uint8_t *codes,
                    float *scales)
{
    for (size_t begin = 0; begin < count; begin += MO_CODE_BLOCK) {
        const size_t end = count - begin < MO_CODE_BLOCK ? count : begin + MO_CODE_BLOCK;
        float largest = 0, per;

        for (size_t i = begin; i < end; i++)
            if (isfinite(values[i]) && fabsf(values[i]) > largest)
                largest = fabsf(values[i]);
        scales[begin / MO_CODE_BLOCK] = largest = mo_code_scale(largest);
        per = second ? mo_code_per_v(bits, largest) : mo_code_per_m(bits, largest);
        for (size_t i = begin; i < end; i++) {
            const float value = isfinite(values[i]) ? values[i] : 0;
            mo_element_put_code(bits, codes, i,
                                second ? mo_code_encode_v(bits, value, per, MO_CODE_NEAREST)
                                       : mo_code_encode_m(bits, value, per, MO_CODE_NEAREST));
        }
    }
}
