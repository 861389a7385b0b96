/* torch's std::function<bool(cudaStream_t)> as C sees it: which streams belong to a private pool. torch passes one by
 * address when a pool begins (a graph capture, use_mem_pool) and destroys it after the call; so it is copied, asked at
 * each allocation, and destroyed when the pool ends.
 *
 * The layout is libstdc++'s (every torch wheel for Linux is built with it), the same since 2005: two words of functor,
 * then two functions. libstdc++'s operations of a manager: 2 copies the functor, 3 destroys it. */
#ifndef MO_STREAM_FILTER_H
#define MO_STREAM_FILTER_H

#include "driver/driver.h"

typedef struct mo_stream_filter {
    void *functor[2];
    bool (*manager)(void *self, const void *other,
                    int operation); /* NULL: an empty function, that accepts nothing */
    bool (*invoker)(const void *self, mo_stream *stream);
} mo_stream_filter;

/* *copy becomes a function of its own. May be left by a C++ exception (std::bad_alloc); there is nothing to undo then,
 * and the caller must hold nothing. */
void mo_stream_filter_copy(mo_stream_filter *copy, const mo_stream_filter *filter);

/* What it says of a stream. torch's own asks CUDA what the stream is capturing and throws where CUDA refuses: the
 * caller asks CUDA the same first, and not the filter where it refuses. */
bool mo_stream_filter_accepts(const mo_stream_filter *filter, mo_stream stream);

void mo_stream_filter_destroy(mo_stream_filter *filter);

#endif
