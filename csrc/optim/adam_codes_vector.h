/* adam_codes_generic.c in vectors. Included once by each instruction set's file, after the header that defines
 * the words and after GROUP, TOGETHER and encode_group(): how vectors are packed to bytes is what differs most.
 *
 * A block can only be coded when its scales are known, that is after its last element. So while one block is
 * updated, which waits for divisions and roots, the one before it is coded, which is integers. */

/* What the elements of a block have in common. */
typedef struct codes_vectors {
    vec factor, weight_decay, decay, beta1, rest1, beta2, rest2, step_size, root, eps;
    vec unit_m, zero_m, minus_zero_m, unit_v, zero_v;
    vec largest_m, largest_v; /* so far */
} codes_vectors;

WORD codes_vectors codes_broadcast(unsigned bits, const mo_adam_termsf *c, float m_scale, float v_scale)
{
    const vec unit_m = all(mo_code_unit_m(bits, m_scale)), unit_v = all(mo_code_unit_v(bits, v_scale));

    return (codes_vectors){
        .factor = all(c->factor),
        .weight_decay = all(c->weight_decay),
        .decay = all(c->decay),
        .beta1 = all(c->beta1),
        .rest1 = all(c->rest1),
        .beta2 = all(c->beta2),
        .rest2 = all(c->rest2),
        .step_size = all(c->step_size),
        .root = all(c->root),
        .eps = all(c->eps),
        .unit_m = unit_m,
        .zero_m = mul(all(-MO_CODE_C_M(bits)), unit_m),
        .minus_zero_m = mul(all(MO_CODE_C_M(bits)), unit_m),
        .unit_v = unit_v,
        .zero_v = mul(all(-MO_CODE_C_V), unit_v),
        .largest_m = all(0),
        .largest_v = all(0),
    };
}

/* TOGETHER vectors of elements from number i of the run on, which is `in` of its block: decoded, updated, left in *values. Step by
 * step for all of them: what waits for a division or a root would else fill the processor's queues. */
WORD void update_lanes(unsigned bits, codes_vectors *c, unsigned flags, bool plain, bool factored,
                       const mo_run *run, size_t i, size_t in, block_values *values)
{
    vec old[TOGETHER], x[TOGETHER], m[TOGETHER], v[TOGETHER];

    for (size_t k = 0; k < TOGETHER; k++) {
        const size_t at = i + k * LANES;
        const veci m_code = m_codes_in_place(bits, run->m, at);

        m[k] = as_float(add(m_code, alli(MO_CODE_ZERO_M(bits))));
        m[k] = mul_add(m[k], c->unit_m, by_sign(m_code, c->minus_zero_m, c->zero_m));
        v[k] = factored ? load((const float *)run->v + at, LANES)
                        : mul_add(as_float(add(v_codes_in_place(bits, run->v, at), alli(MO_CODE_ZERO_V))),
                                  c->unit_v, c->zero_v);
        old[k] = plain ? load((float *)run->p + at, LANES) : load_p(run, at, LANES);
        x[k] = mul(plain ? load((float *)run->g + at, LANES) : load_g(run, at, LANES), c->factor);
        if (flags & MO_ADAM_L2)
            x[k] = mul_add(c->weight_decay, old[k], x[k]);
        m[k] = mul_add(c->beta1, m[k], mul(c->rest1, x[k]));
        v[k] = mul_add(c->beta2, v[k], mul(c->rest2, mul(x[k], x[k])));
    }
    for (size_t k = 0; k < TOGETHER; k++) {
        const vec kept_m = up_to(MO_CODE_HUGE, v[k], m[k]);

        store(values->m + in + k * LANES, kept_m, LANES);
        c->largest_m = larger_number(magnitude(kept_m), c->largest_m);
        if (!factored) {
            const vec kept_v = up_to(MO_CODE_HUGE, v[k], v[k]);
            store(values->v + in + k * LANES, kept_v, LANES);
            c->largest_v = larger_number(kept_v, c->largest_v);
        }
        x[k] = root(v[k]);
    }
    for (size_t k = 0; k < TOGETHER; k++)
        x[k] = quotient(m[k], mul_add(x[k], c->root, c->eps));
    for (size_t k = 0; k < TOGETHER; k++) {
        x[k] = mul_add(c->step_size, x[k], mul(old[k], c->decay));
        if (plain)
            store((float *)run->p + i + k * LANES, x[k], LANES);
        else
            store_p(run, i + k * LANES, x[k], LANES);
    }
}

/* The lines of the parameter and the gradient that will be wanted two blocks on. An address behind the
 * array's end does no harm. */
WORD void fetch_ahead(bool plain, const mo_run *run, size_t i)
{
    const size_t p_size = plain ? 4 : mo_float_size(run->kind),
                 g_size = plain ? 4 : mo_float_size(run->grad_kind);

    for (size_t k = 0; k < GROUP; k += 16) {
        __builtin_prefetch((const char *)run->p + (i + k + 2 * MO_CODE_ELEMENTS) * p_size);
        __builtin_prefetch((const char *)run->g + (i + k + 2 * MO_CODE_ELEMENTS) * g_size);
    }
}

/* Updates the block at number `at`, its values into *values; meanwhile codes *earlier, those of the block
 * before, if there is one. */
WORD void update_block(unsigned bits, const mo_adam_termsf *terms, unsigned flags, bool plain, bool factored,
                       const mo_run *run, size_t at, block_values *values, const block_values *earlier,
                       const uint32_t *ramp_of_block)
{
    float none = 0, *const m_scale = run->m_scale + at / MO_CODE_ELEMENTS,
          *const v_scale = factored ? &none : run->v_scale + at / MO_CODE_ELEMENTS;
    codes_vectors c = codes_broadcast(bits, terms, *m_scale, *v_scale);

    for (size_t i = 0; i < MO_CODE_ELEMENTS; i += GROUP) {
        for (size_t k = 0; k < GROUP; k += TOGETHER * LANES)
            update_lanes(bits, &c, flags, plain, factored, run, at + i + k, i + k, values);
        fetch_ahead(plain, run, at + i);
        if (earlier)
            encode_group(bits, factored, earlier, i, ramp_of_block);
    }
    *m_scale = mo_code_scale(largest(c.largest_m));
    *v_scale = mo_code_scale(largest(c.largest_v));
    values->per_m = mo_code_per_m(bits, *m_scale);
    values->per_v = mo_code_per_v(bits, *v_scale);
    values->dither_m = mo_code_dither_m(bits, run->index + (uint32_t)at, run->step);
    values->dither_v = mo_code_dither(run->index + (uint32_t)at, run->step);
    values->m_codes = (uint8_t *)run->m + at * bits / 8;
    values->v_codes = factored ? NULL : (uint8_t *)run->v + at * bits / 8;
}

WORD void codes_with(unsigned bits, const mo_adam_termsf *terms, unsigned flags, bool plain, bool factored,
                     const mo_run *run)
{
    const mo_adam_termsf c = *terms;
    const mo_run r = *run; /* copies of its own, which no store can change */
    const size_t whole = r.n / MO_CODE_ELEMENTS * MO_CODE_ELEMENTS;
    block_values values[2];
    uint32_t ramp_of_block[MO_CODE_ELEMENTS];
    size_t at = 0, now = 0;

    if (whole == 0)
        return;
    for (uint32_t i = 0; i < MO_CODE_ELEMENTS; i++)
        ramp_of_block[i] = i * MO_CODE_DITHER_INDEX;
    update_block(bits, &c, flags, plain, factored, &r, at, &values[now], NULL, ramp_of_block);
    for (at += MO_CODE_ELEMENTS; at < whole; at += MO_CODE_ELEMENTS) {
        update_block(bits, &c, flags, plain, factored, &r, at, &values[!now], &values[now], ramp_of_block);
        now = !now;
    }
    for (size_t i = 0; i < MO_CODE_ELEMENTS; i += GROUP)
        encode_group(bits, factored, &values[now], i, ramp_of_block);
}

WORD void codes_of(unsigned bits, const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    if (run->factored && is_plain(run))
        codes_with(bits, terms, flags, true, true, run);
    else if (run->factored)
        codes_with(bits, terms, flags, false, true, run);
    else if (!is_plain(run))
        codes_with(bits, terms, flags, false, false, run);
    else if (flags & MO_ADAM_L2)
        codes_with(bits, terms, MO_ADAM_L2, true, false, run);
    else
        codes_with(bits, terms, 0, true, false, run);
}

/* Whole blocks only. */
VECTOR static void codes_blocks(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    if (run->code_bits == 8)
        codes_of(8, terms, flags, run);
    else
        codes_of(4, terms, flags, run);
}

/* The last block, from number `at` on, run on a copy with zeros behind: they leave the scales alone. */
VECTOR static void codes_short_block(const mo_adam_termsf *terms, unsigned flags, const mo_run *run,
                                     size_t at)
{
    const unsigned bits = run->code_bits;
    const size_t n = run->n - at, bytes = (n * bits + 7) / 8, from = at * bits / 8;
    float p[MO_CODE_ELEMENTS] = {0}, g[MO_CODE_ELEMENTS] = {0};
    uint8_t m[MO_CODE_ELEMENTS] = {0}, v[MO_CODE_ELEMENTS] = {0};
    float factored_v[MO_CODE_ELEMENTS] = {0};
    const mo_run padded = {
        .n = MO_CODE_ELEMENTS,
        .p = p,
        .g = g,
        .m = m,
        .v = run->factored ? (void *)factored_v : v,
        .m_scale = run->m_scale + at / MO_CODE_ELEMENTS,
        .v_scale = run->factored ? NULL : run->v_scale + at / MO_CODE_ELEMENTS,
        .code_bits = bits,
        .factored = run->factored,
        .stored = 1,
        .index = run->index + (uint32_t)at,
        .step = run->step,
    };

    memcpy(m, (uint8_t *)run->m + from, bytes);
    if (run->factored)
        memcpy(factored_v, (float *)run->v + at, n * sizeof *factored_v);
    else
        memcpy(v, (uint8_t *)run->v + from, bytes);
    if (n * bits % 8) { /* half a byte is no element's, whatever it holds */
        m[bytes - 1] &= 15;
        v[bytes - 1] &= 15;
    }
    for (size_t i = 0; i < n; i += LANES) {
        const size_t lanes = n - i < LANES ? n - i : LANES;
        store(p + i, load_p(run, at + i, lanes), lanes);
        store(g + i, load_g(run, at + i, lanes), lanes);
    }
    codes_blocks(terms, flags, &padded);
    for (size_t i = 0; i < n; i += LANES) {
        const size_t lanes = n - i < LANES ? n - i : LANES;
        store_p(run, at + i, load(p + i, lanes), lanes);
    }
    memcpy((uint8_t *)run->m + from, m, bytes);
    if (!run->factored)
        memcpy((uint8_t *)run->v + from, v, bytes);
}

VECTOR static void codes_run(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    codes_blocks(terms, flags, run);
    if (run->n % MO_CODE_ELEMENTS)
        codes_short_block(terms, flags, run, run->n / MO_CODE_ELEMENTS * MO_CODE_ELEMENTS);
}

/* ---- m alone, of 8 bits and dithered ------------------------------------------------------------------------------------- */

VECTOR static void decode_m(const uint8_t *codes, float scale, float *m)
{
    const vec unit = all(mo_code_unit_m(8, scale)), zero = mul(all(-MO_CODE_C_M(8)), unit),
              minus_zero = mul(all(MO_CODE_C_M(8)), unit);

    for (size_t i = 0; i < MO_CODE_ELEMENTS; i += LANES) {
        const veci code = m_codes_in_place(8, codes, i);
        const vec y = as_float(add(code, alli(MO_CODE_ZERO_M(8))));

        store(m + i, mul_add(y, unit, by_sign(code, minus_zero, zero)), LANES);
    }
}

WORD vec kept_m(const float *m)
{
    const vec x = load(m, LANES);

    return up_to(MO_CODE_HUGE, magnitude(x), x);
}

VECTOR static float encode_m(const float *m, uint32_t dither, uint8_t *codes)
{
    vec most[4] = {all(0), all(0), all(0), all(0)}; /* four, that none waits for the one before */
    vec per;
    float scale;

    for (size_t i = 0; i < MO_CODE_ELEMENTS; i += 4 * LANES)
        for (size_t k = 0; k < 4; k++)
            most[k] = larger_number(magnitude(kept_m(m + i + k * LANES)), most[k]);
    scale = largest(larger_number(larger_number(most[0], most[1]), larger_number(most[2], most[3])));
    scale = mo_code_scale(scale);
    per = all(mo_code_per_m(8, scale));
    for (size_t i = 0; i < MO_CODE_ELEMENTS; i += GROUP) {
        vec x[GROUP / LANES];
        veci addend[GROUP / LANES];

        for (size_t k = 0; k < GROUP / LANES; k++) {
            const uint32_t first = dither + (uint32_t)(i + k * LANES) * MO_CODE_DITHER_INDEX;

            x[k] = kept_m(m + i + k * LANES);
            addend[k] = dithered_m(8, add(alli(first), ramp(MO_CODE_DITHER_INDEX)));
        }
        encode_group_m(x, per, addend, codes + i);
    }
    return scale;
}
