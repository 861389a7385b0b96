/* cuFile: reads and writes fail the way a file system without GPUDirect Storage makes them fail.
 * They need bodies because their failure is a negative count, where a stub's status would read as bytes
 * moved. */
#include "csrc/simcuda/library.h"

#include <sys/types.h>

#define CU_FILE_IO_NOT_SUPPORTED 5008 /* CUFILEOP_BASE_ERR + 8 */

ssize_t cuFileRead(void *file, void *base, size_t bytes, off_t file_offset, off_t base_offset)
{
    return -CU_FILE_IO_NOT_SUPPORTED;
}

ssize_t cuFileWrite(void *file, const void *base, size_t bytes, off_t file_offset, off_t base_offset)
{
    return -CU_FILE_IO_NOT_SUPPORTED;
}
