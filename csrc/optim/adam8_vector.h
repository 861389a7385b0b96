/* adam8_generic.c in vectors. Included once by each instruction set's file, after the header that defines the words and after
 * encode_block(): how vectors are packed to bytes is what differs most. */
typedef struct block_values {
    float m[MO_ADAM8_ELEMENTS], v[MO_ADAM8_ELEMENTS];
} __attribute__((aligned(64))) block_values;

typedef struct block_codes {
    uint8_t *m, *v;
    float per_m, per_v;
    uint32_t dither;              /* of the block's first element */
    const float *next_p, *next_g; /* to be fetched meanwhile */
} block_codes;

static void encode_block(const block_values *values, const block_codes *to);

/* The parameter's and the gradient's lines that will be wanted two blocks on: while codes are made memory would be idle. An address
 * behind the array's end does no harm. */
WORD void fetch_ahead(const float *x)
{
    __builtin_prefetch((const char *)x + 2 * MO_ADAM8_ELEMENTS * sizeof *x);
}

/* What encode_block() makes of one vector: the code of m without its sign, and that of v, as integers of up to 13 bits that count
 * as 127 and 255 where they are more. */
WORD veci encoded_m(vec m, vec per)
{
    const veci y = as_bits(mul_add(magnitude(m), per, all(MO_ADAM8_C_M)));
    return right(add(y, alli((1u << (MO_ADAM8_SHIFT - 1)) - MO_ADAM8_ZERO_M)), MO_ADAM8_SHIFT);
}

WORD veci encoded_v(vec v, vec per, veci dither)
{
    const veci y = as_bits(mul_add(v, per, all(MO_ADAM8_C_V)));
    return right(add(y, sub(right(dither, 32 - MO_ADAM8_SHIFT), alli(MO_ADAM8_ZERO_V))), MO_ADAM8_SHIFT);
}

/* Decodes, updates p, leaves the states in *values and their largest in the scales. */
WORD void update_block(const mo_adam_termsf *terms, unsigned flags, float *p, const float *g,
                       mo_adam8_states states, block_values *values)
{
    const vec factor = all(terms->factor), weight_decay = all(terms->weight_decay), decay = all(terms->decay);
    const vec beta1 = all(terms->beta1), rest1 = all(terms->rest1), beta2 = all(terms->beta2),
              rest2 = all(terms->rest2);
    const vec step_size = all(terms->step_size), root2 = all(terms->root), eps = all(terms->eps);
    const vec unit_m = all(mo_adam8_unit_m(*states.m_scale)), zero_m = mul(all(-MO_ADAM8_C_M), unit_m);
    const vec unit_v = all(mo_adam8_unit_v(*states.v_scale)), zero_v = mul(all(-MO_ADAM8_C_V), unit_v);
    vec largest_m = all(0), largest_v = all(0);

    for (size_t i = 0; i < MO_ADAM8_ELEMENTS; i += LANES) {
        const vec old = load(p + i, LANES);
        const veci m_code = load_bytes(states.m + i), v_code = load_bytes(states.v + i);
        vec x = mul(load(g + i, LANES), factor), m, v;

        if (flags & MO_ADAM_L2)
            x = mul_add(weight_decay, old, x);
        m = as_float(add(right(left(m_code, 25), 25 - MO_ADAM8_SHIFT), alli(MO_ADAM8_ZERO_M)));
        m = with_sign(mul_add(m, unit_m, zero_m), left(m_code, 24));
        v = mul_add(as_float(add(left(v_code, MO_ADAM8_SHIFT), alli(MO_ADAM8_ZERO_V))), unit_v, zero_v);
        m = mul_add(beta1, m, mul(rest1, x));
        v = mul_add(beta2, v, mul(rest2, mul(x, x)));
        store(values->m + i, m, LANES);
        store(values->v + i, v, LANES);
        store(p + i, mul_add(step_size, quotient(m, mul_add(root(v), root2, eps)), mul(old, decay)), LANES);
        largest_m = larger_number(magnitude(m), largest_m);
        largest_v = larger_number(v, largest_v);
    }
    *states.m_scale = mo_adam8_scale(largest(largest_m));
    *states.v_scale = mo_adam8_scale(largest(largest_v));
}

WORD void run_blocks(const mo_adam_termsf *terms, unsigned flags, size_t blocks, float *p, const float *g,
                     mo_adam8_states states, uint32_t index, uint32_t step)
{
    block_values values;

    for (size_t b = 0; b < blocks; b++) {
        const size_t at = b * MO_ADAM8_ELEMENTS;
        const mo_adam8_states block = {states.m + at, states.v + at, states.m_scale + b, states.v_scale + b};
        update_block(terms, flags, p + at, g + at, block, &values);
        const block_codes to = {block.m,
                                block.v,
                                mo_adam8_per_m(*block.m_scale),
                                mo_adam8_per_v(*block.v_scale),
                                mo_adam8_dither(index + (uint32_t)at, step),
                                p + at,
                                g + at};
        encode_block(&values, &to);
    }
}
