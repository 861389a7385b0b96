/* Errors as values. Every function below csrc/python that can fail returns a mo_status; what a person needs to
 * know beyond it (which call, the driver's own code, a sentence) goes to a mo_detail that the caller passes,
 * or NULL where nobody will read it. There is no error state anywhere else. */
#ifndef MO_STATUS_H
#define MO_STATUS_H

/*    status              what it says of the world                                       */
#define MO_STATUS_LIST(X)                                                                                    \
    X(MO_OK, "success")                                                                                      \
    X(MO_INVALID, "an argument is wrong")                                                                    \
    X(MO_OVERFLOW, "a size does not fit")                                                                    \
    X(MO_NO_HOST_MEMORY, "out of host memory")                                                               \
    X(MO_NO_DEVICE_MEMORY, "out of device memory")                                                           \
    X(MO_NOT_READY, "the device has not finished yet")                                                       \
    X(MO_NO_LIBRARY, "a library cannot be opened")                                                           \
    X(MO_NO_SYMBOL, "a library lacks a required function")                                                   \
    X(MO_NO_DEVICE, "there is no such device")                                                               \
    X(MO_UNSUPPORTED, "this device or driver does not support the operation")                                \
    X(MO_DRIVER, "the CUDA driver reports an error")                                                         \
    X(MO_COMPILER, "the run-time compiler reports an error")                                                 \
    X(MO_IO, "a file operation failed")                                                                      \
    X(MO_CORRUPT, "a file or image is damaged")

#define MO_STATUS_ENUM(name, text) name,
typedef enum mo_status { MO_STATUS_LIST(MO_STATUS_ENUM) MO_STATUS_COUNT } mo_status;
#undef MO_STATUS_ENUM

typedef struct mo_detail {
    mo_status status; /* equal to the value returned */
    int code;         /* the callee's own number (CUresult, nvrtcResult, errno), 0 where it has none */
    char text[1024];  /* one sentence or a few: what failed, with what, and the mend; always terminated */
} mo_detail;

/* "MO_OK", …; "MO_?" for a number that is no status. */
const char *mo_status_name(mo_status status);

/* The middle column of the list above. */
const char *mo_status_text(mo_status status);

/* Fills *detail unless it is NULL; a longer text is cut. */
void mo_tell(mo_detail *detail, mo_status status, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static inline mo_status mo_told(mo_status status)
{
    return status; /* which, unlike a plain operand, may be left unused */
}

/* Tells, and is the status, so that a failure is one line:
 *     return mo_fail(detail, MO_INVALID, 0, "…", …);
 * A macro, so that every compiler and analyser sees that what comes back is what went in. */
#define mo_fail(detail, status, ...) (mo_tell(detail, status, __VA_ARGS__), mo_told(status))

#endif
