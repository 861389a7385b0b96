/* cuDNN's v8 graph API: a backend descriptor is a bag of attributes.
 *
 * cudnn_frontend (inside torch) builds an operation graph, asks a heuristics descriptor for engine
 * configurations, makes a plan of each, reads its workspace size and executes the first that fits. Here a
 * descriptor keeps what was set and gives it back; the heuristics offer a configuration with the set
 * workspace and, when that is not 0, a second one without, because torch goes on to the next plan when a
 * workspace cannot be allocated, as it does on a GPU.
 */
#include "csrc/simcuda/library_cudnn.h"

#include <stdlib.h>
#include <string.h>

/* cudnnBackendAttributeName_t: the ones that are answered instead of remembered. */
enum {
    HEURISTICS_RESULTS = 202,
    CONFIG_ENGINE = 300,
    CONFIG_INTERMEDIATE_INFO = 301,
    CONFIG_KNOB_CHOICES = 302,
    CONFIG_WORKSPACE = 303,
    CONFIG_SHARED_MEMORY = 304,
    PLAN_ENGINE_CONFIG = 401,
    PLAN_WORKSPACE = 402,
    PLAN_JSON = 405,
    GRAPH_ENGINE_COUNT = 802,
    ENGINE_GLOBAL_INDEX = 1301,
    ENGINE_KNOB_INFO = 1302,
    ENGINE_NUMERICAL_NOTE = 1303,
    ENGINE_BEHAVIOR_NOTE = 1305,
    OURS_NO_WORKSPACE = -1, /* a mark of our own on the second configuration and on plans made of it */
};

/* cudnnBackendAttributeType_t. */
enum {
    TYPE_HANDLE = 0,
    TYPE_BOOLEAN = 2,
    TYPE_INT64 = 3,
    TYPE_DOUBLE = 5,
    TYPE_VOID_PTR = 6,
    TYPE_BACKEND_DESCRIPTOR = 15,
    TYPE_CHAR = 24,
    TYPE_FRACTION = 26, /* two int64 */
};

struct attribute {
    struct attribute *next;
    int name, type;
    int64_t count;
    void *values; /* owned */
};

struct descriptor {
    int type;
    struct attribute *attributes;
};

/* Every other type is an enum or a 32-bit number. */
static size_t type_bytes(int type)
{
    switch (type) {
    case TYPE_HANDLE:
    case TYPE_INT64:
    case TYPE_DOUBLE:
    case TYPE_VOID_PTR:
    case TYPE_BACKEND_DESCRIPTOR:
        return 8;
    case TYPE_BOOLEAN:
    case TYPE_CHAR:
        return 1;
    case TYPE_FRACTION:
        return 16;
    default:
        return 4;
    }
}

static struct attribute *find(const struct descriptor *descriptor, int name)
{
    struct attribute *each = descriptor->attributes;
    while (each != NULL && each->name != name)
        each = each->next;
    return each;
}

/* Copies the values in: what a caller passes need not outlive the call. */
static int keep(struct descriptor *descriptor, int name, int type, int64_t count, const void *values)
{
    if (count < 0)
        return CUDNN_BAD_PARAM;
    size_t bytes = (size_t)count * type_bytes(type);
    void *copy = malloc(bytes + 1); /* +1: an empty list is kept too */
    struct attribute *attribute = find(descriptor, name);
    struct attribute *fresh = attribute == NULL ? calloc(1, sizeof *fresh) : NULL;
    if (copy == NULL || (attribute == NULL && fresh == NULL)) {
        free(copy);
        free(fresh);
        return CUDNN_ALLOCATION_FAILED;
    }
    if (bytes > 0)
        memcpy(copy, values, bytes);
    if (attribute == NULL) {
        attribute = fresh;
        attribute->next = descriptor->attributes;
        descriptor->attributes = attribute;
    }
    free(attribute->values);
    attribute->name = name;
    attribute->type = type;
    attribute->count = count;
    attribute->values = copy;
    return CUDNN_SUCCESS;
}

static int mark_no_workspace(struct descriptor *descriptor)
{
    const int64_t zero = 0;
    return keep(descriptor, OURS_NO_WORKSPACE, TYPE_INT64, 1, &zero);
}

int cudnnBackendCreateDescriptor(int type, struct descriptor **out)
{
    int status = sim_cudnn_make((void **)out, sizeof **out);
    if (status == CUDNN_SUCCESS)
        (*out)->type = type;
    return status;
}

int cudnnBackendDestroyDescriptor(struct descriptor *descriptor)
{
    if (descriptor == NULL)
        return CUDNN_SUCCESS;
    for (struct attribute *each = descriptor->attributes; each != NULL;) {
        struct attribute *next = each->next;
        free(each->values);
        free(each);
        each = next;
    }
    free(descriptor);
    return CUDNN_SUCCESS;
}

int cudnnBackendFinalize(struct descriptor *descriptor)
{
    return descriptor == NULL ? CUDNN_NULL_POINTER : CUDNN_SUCCESS;
}

int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count,
                             const void *values)
{
    if (descriptor == NULL || (count > 0 && values == NULL))
        return CUDNN_NULL_POINTER;
    int status = keep(descriptor, name, type, count, values);
    if (status == CUDNN_SUCCESS && name == PLAN_ENGINE_CONFIG && count == 1) {
        const struct descriptor *config = *(struct descriptor *const *)values;
        if (config != NULL && find(config, OURS_NO_WORKSPACE) != NULL)
            status = mark_no_workspace(descriptor);
    }
    return status;
}

static int answer(int64_t requested, int64_t *count, void *out, const void *value, size_t bytes)
{
    if (count != NULL)
        *count = 1;
    if (requested >= 1 && out != NULL)
        memcpy(out, value, bytes);
    return CUDNN_SUCCESS;
}

static int answer_none(int64_t *count)
{
    if (count != NULL)
        *count = 0;
    return CUDNN_SUCCESS;
}

static int64_t config_count(void)
{
    return cudnn_workspace() > 0 ? 2 : 1;
}

/* The caller first asks how many there are, then brings empty configuration descriptors; they are valid as
 * they are. The count told then is of those that were filled: a caller that brings fewer must not be told of
 * more. */
static int answer_heuristics(int64_t requested, int64_t *count, struct descriptor **out)
{
    int64_t configs = config_count();
    if (out != NULL && requested < configs)
        configs = requested;
    if (count != NULL)
        *count = configs;
    return out != NULL && configs == 2 ? mark_no_workspace(out[1]) : CUDNN_SUCCESS;
}

/* A caller reads a descriptor by bringing its own, which gets a copy of the attributes. */
static int copy_descriptors(const struct attribute *from, int64_t count, struct descriptor **out)
{
    for (int64_t i = 0; i < count; i++) {
        const struct descriptor *source = ((struct descriptor **)from->values)[i];
        if (source == NULL || out[i] == NULL || source == out[i])
            continue;
        for (const struct attribute *each = source->attributes; each != NULL; each = each->next) {
            int status = keep(out[i], each->name, each->type, each->count, each->values);
            if (status != CUDNN_SUCCESS)
                return status;
        }
    }
    return CUDNN_SUCCESS;
}

static int answer_kept(const struct descriptor *descriptor, int name, int type, int64_t requested,
                       int64_t *count, void *out)
{
    const struct attribute *kept = find(descriptor, name);
    if (count != NULL)
        *count = kept == NULL ? 0 : kept->count;
    if (kept == NULL || out == NULL)
        return CUDNN_SUCCESS;
    int64_t given = requested < kept->count ? requested : kept->count;
    if (type == TYPE_BACKEND_DESCRIPTOR)
        return copy_descriptors(kept, given, out);
    memcpy(out, kept->values, (size_t)given * type_bytes(type));
    return CUDNN_SUCCESS;
}

int cudnnBackendGetAttribute(const struct descriptor *descriptor, int name, int type, int64_t requested,
                             int64_t *count, void *out)
{
    static const char json[] = "{}";
    const int64_t zero = 0;
    if (descriptor == NULL)
        return CUDNN_NULL_POINTER;
    switch (name) {
    case HEURISTICS_RESULTS:
        return answer_heuristics(requested, count, out);
    case CONFIG_INTERMEDIATE_INFO:
    case CONFIG_KNOB_CHOICES:
    case ENGINE_KNOB_INFO:
    case ENGINE_NUMERICAL_NOTE:
    case ENGINE_BEHAVIOR_NOTE:
        return answer_none(count);
    case CONFIG_WORKSPACE:
    case PLAN_WORKSPACE: {
        int64_t bytes = find(descriptor, OURS_NO_WORKSPACE) != NULL ? 0 : (int64_t)cudnn_workspace();
        return answer(requested, count, out, &bytes, sizeof bytes);
    }
    case CONFIG_SHARED_MEMORY:
        return answer(requested, count, out, &zero, sizeof(int32_t));
    case GRAPH_ENGINE_COUNT: {
        int64_t configs = config_count();
        return answer(requested, count, out, &configs, sizeof configs);
    }
    case ENGINE_GLOBAL_INDEX:
        if (find(descriptor, name) == NULL)
            return answer(requested, count, out, &zero, sizeof zero);
        break;
    case CONFIG_ENGINE: /* never set on a configuration of the heuristics': the caller's engine stays empty */
        if (find(descriptor, name) == NULL) {
            if (count != NULL)
                *count = 1;
            return CUDNN_SUCCESS;
        }
        break;
    case PLAN_JSON: {
        const int64_t length = sizeof json;
        if (count != NULL)
            *count = length;
        if (out != NULL)
            memcpy(out, json, (size_t)(requested < length ? requested : length));
        return CUDNN_SUCCESS;
    }
    }
    return answer_kept(descriptor, name, type, requested, count, out);
}

int cudnnBackendExecute(void *handle, const struct descriptor *plan, const struct descriptor *variants)
{
    return handle == NULL || plan == NULL || variants == NULL ? CUDNN_NULL_POINTER : CUDNN_SUCCESS;
}
