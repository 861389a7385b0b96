/* Bytes from several places put into one, on the threads of the program (base/parallel.h): a batch's tensors into the
 * pinned memory that they are copied to a device from.
 *
 *     pieces lie in the order of their offsets and do not overlap; the gaps between them are left as they are
 *
 * A range of the target is a thread's, whichever pieces it covers: one large piece is shared like many small ones. */
#ifndef MO_PACKING_H
#define MO_PACKING_H

#include <stddef.h>

#define MO_PACK_GRAIN ((size_t)1 << 20) /* bytes that are worth a thread */

typedef struct mo_packed {
    const void *from;
    size_t offset, size;
} mo_packed;

/* Call without the GIL. */
void mo_pack(void *to, const mo_packed *pieces, size_t count);

#endif
