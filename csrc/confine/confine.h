/* A process whose writes come to nothing: the files of its user stay as they are, whatever it and all that it starts
 * do. The kernel keeps that, in one of two ways:
 *
 *     mo_overlay_files    a mount namespace in which every file system lies under an overlay. What is written goes to
 *                         a scratch folder, and reads back. Needs Linux 5.13, and CAP_SYS_ADMIN or a user namespace.
 *     mo_refuse_writes    Landlock: a write outside of the folders named is refused (EACCES), and a change of a mode,
 *                         an owner, a time or an attribute does nothing. Needs Linux 6.2.
 *
 * Not covered: devices, what is below /proc and /sys, the network, and files that were open before. Neither way can be
 * taken back, and both want a process of one thread. */
#ifndef MO_CONFINE_H
#define MO_CONFINE_H

#include <stddef.h>

#include "base/status.h"

/* `scratch`: an absolute path to an empty folder, in which files/P is what was written to P, then; ram/files/P where a
 * disk would not do, and ram/root/P in a folder that holds a mount point. It is removed by the caller, from without.
 * `shared`: absolute paths of folders that stay what they are, `scratch` among them or not.
 * MO_UNSUPPORTED where the kernel, a container or a security module does not allow it: then only namespaces may have
 * been changed, which do not matter to the files, and mo_refuse_writes() may be called. */
mo_status mo_overlay_files(const char *scratch, const char *const *shared, size_t count, mo_detail *detail);

/* `writable`: files and folders that may be written to, with all that is in them. MO_UNSUPPORTED where there is no
 * Landlock, or none that guards against truncation. */
mo_status mo_refuse_writes(const char *const *writable, size_t count, mo_detail *detail);

/* From now on a process whose parent has ended becomes this one's child, if this one had started it, or started who
 * did. */
mo_status mo_adopt_orphans(mo_detail *detail);

#endif
