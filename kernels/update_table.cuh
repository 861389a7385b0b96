/* The table of the update kernel (update.cu), which the host writes and the device reads: mo_update_head, then parameters,
 * groups and units. */
#ifndef MO_UPDATE_TABLE_CUH
#define MO_UPDATE_TABLE_CUH

#include "chunk.cuh"

/* 0 between launches: the last block puts it back, so that a graph may be replayed and a table used again. */
typedef struct MO_ALIGNED(16) mo_update_head {
    unsigned blocks_done;
} mo_update_head;

/* Of a parameter, beside the flags of its rule, which are the lowest bits. */
enum {
    MO_UPDATE_RULE = 0xFF, /* MO_ADAM_… or MO_SGD_… */
    MO_UPDATE_SGD = 0x100,
    MO_UPDATE_DECOUPLED = 0x200, /* AdamW */
    MO_UPDATE_MAXIMIZE = 0x400,
    MO_UPDATE_STOCHASTIC = 0x800 /* and of 16 bits, without a master */
};

/* The address of an array that the parameter lacks is 0. */
typedef struct mo_update_parameter {
    unsigned long long p, g, master, m, v, vmax, m_scale, v_scale, step, count;
    unsigned long long row, column, sums,
        inverse;                           /* of a second moment by factored.cuh, which has no v; else 0 */
    unsigned columns, blocks, blocks_done; /* blocks: of the factored kernel, of which so many are done */
    unsigned unused;
    unsigned flags, group;
    unsigned short kind, grad_kind, state_kind, code_bits; /* 8 or 4; 0: states are of state_kind */
} mo_update_parameter;

typedef struct mo_update_group {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    unsigned long long lr_address; /* 0: lr */
    unsigned lr_kind, unused;
} mo_update_group;

/* Elements [index, index + 1) * launch.elements of a parameter, as far as it has them. */
typedef struct mo_update_unit {
    unsigned parameter, index;
} mo_update_unit;

/* The kernel's argument. */
typedef struct mo_update_launch {
    unsigned long long table;
    unsigned long long factor, found_inf; /* fp32 on the device, or 0 */
    unsigned parameters, groups, units;
    unsigned elements; /* a unit's, a multiple of 1024, at most 2^28: a unit's bytes are counted in 32 bits */
    unsigned store_gradients; /* not 0: they are multiplied by the factor where they lie */
    unsigned first_index;     /* of each parameter's first element, to dithers */
    unsigned first_unit;      /* the factored kernel: of its first block, behind the update kernel's */
} mo_update_launch;

MO_BODY mo_update_head *mo_update_head_of(mo_update_launch launch)
{
    return (mo_update_head *)mo_global(launch.table);
}

MO_BODY const mo_update_parameter *mo_update_parameters(mo_update_launch launch)
{
    return (const mo_update_parameter *)mo_global(launch.table + sizeof(mo_update_head));
}

MO_BODY const mo_update_group *mo_update_groups(mo_update_launch launch)
{
    return (const mo_update_group *)(mo_update_parameters(launch) + launch.parameters);
}

MO_BODY const mo_update_unit *mo_update_units(mo_update_launch launch)
{
    return (const mo_update_unit *)(mo_update_groups(launch) + launch.groups);
}

/* Whether nothing at all is to be changed. */
MO_BODY int mo_update_skipped(mo_update_launch launch)
{
    return launch.found_inf && *(const float *)mo_global(launch.found_inf) != 0;
}

/* Counts the step that was made; one thread does, after all others have read. */
MO_BODY void mo_update_advance(mo_update_launch launch, unsigned parameter)
{
    const unsigned long long step = mo_update_parameters(launch)[parameter].step;

    if (step)
        *(float *)mo_global(step) += 1;
}

#endif
