/* Built with -fexceptions: a copy may be left by one. */
#include "alloc/stream_filter.h"

enum { COPY_FUNCTOR = 2, DESTROY_FUNCTOR = 3 }; /* std::_Manager_operation */

void mo_stream_filter_copy(mo_stream_filter *copy, const mo_stream_filter *filter)
{
    *copy = (mo_stream_filter){{NULL, NULL}, NULL, NULL};
    if (!filter->manager)
        return;
    filter->manager(copy, filter, COPY_FUNCTOR);
    copy->manager = filter->manager;
    copy->invoker = filter->invoker;
}

bool mo_stream_filter_accepts(const mo_stream_filter *filter, mo_stream stream)
{
    return filter->manager && filter->invoker(filter, &stream);
}

void mo_stream_filter_destroy(mo_stream_filter *filter)
{
    if (filter->manager)
        filter->manager(filter, filter, DESTROY_FUNCTOR);
    filter->manager = NULL;
}
