#include "checkpoint/saved_list.h"

#include <string.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"

/* Room for `needed` elements, at least doubled; *block and *room stay as they were on failure. */
static bool grow(void **block, size_t *room, size_t needed, size_t element)
{
    size_t wanted = *room < 8 ? 8 : *room, bytes;
    void *grown;

    if (needed <= *room)
        return true;
    while (wanted < needed)
        if (!mo_mul_ok(wanted, 2, &wanted))
            return false;
    if (!mo_mul_ok(wanted, element, &bytes))
        return false;
    grown = mo_host_realloc(*block, bytes);
    if (!grown)
        return false;
    *block = grown;
    *room = wanted;
    return true;
}

mo_status mo_saved_append(mo_saved_list *list, const mo_form *form, size_t *out_index)
{
    const size_t sizes = form->dimensions > 0 ? (size_t)form->dimensions : 0;
    void *records = list->records, *numbers = list->sizes;
    bool grown = grow(&records, &list->room, list->count + 1, sizeof *list->records);

    list->records = records;
    grown = grown && grow(&numbers, &list->size_room, list->size_count + sizes, sizeof *list->sizes);
    list->sizes = numbers;
    if (!grown)
        return MO_NO_HOST_MEMORY;
    if (sizes)
        memcpy(list->sizes + list->size_count, form->sizes, sizes * sizeof *list->sizes);
    list->records[list->count] = (mo_saved){.device_type = form->device_type,
                                            .device_index = form->device_index,
                                            .dtype = form->dtype,
                                            .dimensions = form->dimensions,
                                            .first = list->size_count};
    list->size_count += sizes;
    *out_index = list->count++;
    return MO_OK;
}

mo_form mo_saved_form(const mo_saved_list *list, size_t index)
{
    const mo_saved *record = &list->records[index];

    MO_ASSERT(index < list->count);
    return (mo_form){record->device_type, record->device_index, record->dtype, record->dimensions,
                     record->dimensions > 0 ? list->sizes + record->first : NULL};
}

bool mo_form_equal(const mo_form *a, const mo_form *b)
{
    return a->dimensions >= 0 && a->dimensions == b->dimensions && a->dtype == b->dtype &&
           a->device_type == b->device_type && a->device_index == b->device_index &&
           (!a->dimensions || !memcmp(a->sizes, b->sizes, (size_t)a->dimensions * sizeof *a->sizes));
}

void mo_saved_free(mo_saved_list *list)
{
    mo_host_free(list->records);
    mo_host_free(list->sizes);
    *list = (mo_saved_list){0};
}
