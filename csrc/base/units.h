/* Sizes as people write them. A number, a unit, nothing else:
 *
 *     "8GiB"  "1.5 GB"  "512m"  " 80 G "  "4096"
 *
 * KiB, MiB, GiB, TiB, PiB, EiB and the bare letters K … E are powers of 1024, as in GPU memory; KB, MB, GB, TB,
 * PB, EB are powers of 1000; B or no unit is bytes. Case does not matter. A fraction is taken exactly, in
 * integers, and what is left under one byte is dropped, so that a budget is never more than what was said. */
#ifndef MO_UNITS_H
#define MO_UNITS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* text[0..length) to bytes; on failure *detail quotes the text. MO_INVALID for what is not a size: empty, a sign,
 * words, half a byte, more than 19 digits from the first that is not 0, more than 19 places. MO_OVERFLOW above
 * INT64_MAX, the most a tensor can have. */
mo_status mo_parse_size(const char *text, size_t length, uint64_t *out, mo_detail *detail);

#define MO_SIZE_TEXT 16

/* Bytes for people, three to four significant digits: "0 B", "1023 B", "1.50 KiB", "79.2 GiB", "16.0 EiB". */
const char *mo_format_size(uint64_t bytes, char out[MO_SIZE_TEXT]);

#endif
