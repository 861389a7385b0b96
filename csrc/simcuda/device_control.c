#include "control.h"

#include "context.h"
#include "device.h"
#include "heap.h"
#include "kernels.h"
#include "streams.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

sim_device sim_devices[SIM_MAX_DEVICES];
int sim_device_count;
bool sim_initialised, sim_lazy, sim_blank, sim_stale_aliases, sim_dead_handles;
int sim_cc, sim_sms;
CUresult sim_fault;
uint64_t sim_reservations, sim_reserved_bytes, sim_host_allocations, sim_modules;
uint64_t sim_host_bytes, sim_host_bytes_peak;

bool sim_activated(void)
{
    return sim_device_count > 0;
}

void sim_device_fault(int device)
{
    sim_devices[device].counts.faults++;
    if (sim_fault == CUDA_SUCCESS)
        sim_fault = CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* ---- settings ----------------------------------------------------------------------------------------- */
typedef struct setting {
    const char *key;
    unsigned long long value, least, most;
    bool given;
} setting;

static setting settings[] = {
    {"memory", 2ull << 30, 4ull << 20, 1ull << 44,
     false}, /* 16 TiB: a byte a frame is 8 MiB of host memory */
    {"devices", 1, 1, SIM_MAX_DEVICES, false},
    {"cc", 80, 50, 999, false},
    {"sms", 108, 1, 1024, false},
    {"lazy", 0, 0, 1, false},
    {"blank", 0, 0, 1, false},
    {"stale_aliases", 0, 0, 1, false},
    {"dead_handles", 0, 0, 1, false},
    {"context", 0, 0, 1ull << 44, false},
    {"cudnn_workspace", 0, 0, 1ull << 44, false},
    {"cudnn_version", 0, 0, 1000000, false},
};

enum { SETTINGS = sizeof settings / sizeof *settings };

static _Atomic uint64_t reads[SETTINGS];

static setting *find_setting(const char *key, size_t length)
{
    for (size_t i = 0; key && i < SETTINGS; i++)
        if (strlen(settings[i].key) == length && memcmp(settings[i].key, key, length) == 0)
            return &settings[i];
    return NULL;
}

unsigned long long simcuda_setting(const char *key)
{
    const setting *found = find_setting(key, key ? strlen(key) : 0);

    if (!found || !sim_activated())
        return 0;
    reads[found - settings]++;
    return found->value;
}

uint64_t simcuda_setting_reads(const char *key)
{
    const setting *found = find_setting(key, key ? strlen(key) : 0);

    return found ? reads[found - settings] : 0;
}

static char message[512]; /* of the last failed activation */

/* One "key=value"; false with the message set. */
static bool parse_pair(const char *pair, size_t length)
{
    const char *equals = memchr(pair, '=', length);
    setting *found = equals ? find_setting(pair, (size_t)(equals - pair)) : NULL;
    unsigned long long value = 0;
    bool valid = found && equals + 1 < pair + length;

    for (const char *at = equals ? equals + 1 : pair; valid && at < pair + length; at++) {
        unsigned digit = (unsigned)*at - '0';
        valid = digit <= 9 && value <= found->most / 10;
        value = 10 * value + digit;
        valid = valid && value <= found->most;
    }
    if (!equals || !found)
        snprintf(message, sizeof message, "unknown setting '%.*s'", (int)length, pair);
    else if (found->given)
        snprintf(message, sizeof message, "setting '%s' is given twice", found->key);
    else if (!valid || value < found->least)
        snprintf(message, sizeof message, "setting '%.*s': needs a whole number from %llu to %llu",
                 (int)length, pair, found->least, found->most);
    else {
        found->value = value;
        found->given = true;
        return true;
    }
    return false;
}

static bool parse(const char *text)
{
    static setting defaults[SETTINGS];
    static bool kept;

    if (!kept)
        memcpy(defaults, settings, sizeof settings);
    kept = true;
    memcpy(settings, defaults, sizeof settings); /* nothing is left of an attempt that failed */
    for (text += strspn(text, " "); *text; text += strspn(text, " ")) {
        size_t length = strcspn(text, " ");
        if (!parse_pair(text, length))
            return false;
        text += length;
    }
    if (find_setting("context", 7)->value > find_setting("memory", 6)->value) {
        snprintf(message, sizeof message, "setting 'context' is larger than 'memory'");
        return false;
    }
    return true;
}

/* ---- never beside a real driver ------------------------------------------------------------------------ */
static const char own_code;

/* May there be a driver in the process: a library of its name that is not the file this code came from, or
 * NVIDIA's device files mapped? `message` then names it. Where the kernel does not tell, there may be. */
static bool real_driver_possible(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024], path[1024];
    unsigned long start, end, inode, own_inode = 0;
    unsigned major_, minor_, own_major = 0, own_minor = 0;
    bool found = false;

    if (!maps) {
        snprintf(message, sizeof message,
                 "/proc/self/maps cannot be read (%s), so a real CUDA driver may be loaded in this process: "
                 "mount /proc, and leave the process file descriptors",
                 strerror(errno));
        return true;
    }
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %*4s %*x %x:%x %lu", &start, &end, &major_, &minor_, &inode) == 5 &&
            (unsigned long)&own_code >= start && (unsigned long)&own_code < end) {
            own_inode = inode;
            own_major = major_;
            own_minor = minor_;
        }
    rewind(maps);
    while (!found && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %*4s %*x %x:%x %lu %1023[^\n]", &start, &end, &major_, &minor_, &inode,
                   path) != 6)
            continue;
        if (inode == own_inode && major_ == own_major && minor_ == own_minor)
            continue;
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        found = strncmp(name, "libcuda.so", 10) == 0 || strncmp(path, "/dev/nvidia", 11) == 0;
        if (found)
            snprintf(
                message, sizeof message,
                "a real CUDA driver is loaded in this process (%.300s): activate the simulated device in "
                "its own process, before anything uses CUDA",
                path);
    }
    fclose(maps);
    return found;
}

/* ---- activation ---------------------------------------------------------------------------------------- */
static bool open_devices(void)
{
    size_t frames = simcuda_setting("memory") / SIM_FRAME, taken = simcuda_setting("context") / SIM_FRAME;

    for (int device = 0; device < sim_device_count; device++) {
        sim_device *opened = &sim_devices[device];
        if (!sim_store_open(&opened->store, device, frames, taken) ||
            !(opened->legacy = sim_stream_new_default(device)) ||
            !(opened->default_pool = sim_pool_new(device, 0))) {
            snprintf(message, sizeof message, "the host has no memory for device %d", device);
            return false; /* what was opened stays unused: the process can't go on as asked anyway */
        }
        opened->pool = opened->default_pool;
    }
    return true;
}

const char *simcuda_activate(const char *text)
{
    const char *result = message;

    sim_lock();
    if (sim_activated())
        result = "the simulated device is already active; a process can activate it only once";
    else if (parse(text ? text : "") && !real_driver_possible()) {
        sim_device_count = (int)find_setting("devices", 7)->value;
        sim_cc = (int)simcuda_setting("cc");
        sim_sms = (int)simcuda_setting("sms");
        sim_lazy = simcuda_setting("lazy") != 0;
        sim_blank = simcuda_setting("blank") != 0;
        sim_stale_aliases = simcuda_setting("stale_aliases") != 0;
        sim_dead_handles = simcuda_setting("dead_handles") != 0;
        if (open_devices()) {
            if (sim_kernel_bodies_register)
                sim_kernel_bodies_register();
            result = NULL;
        } else {
            sim_device_count = 0;
        }
    }
    sim_unlock();
    return result;
}

/* ---- statistics ---------------------------------------------------------------------------------------- */
int simcuda_stats(int device, simcuda_counts *out)
{
    sim_lock();
    bool exists = sim_device_exists(device) && out;
    if (exists) {
        const sim_device *of = &sim_devices[device];
        *out = of->counts;
        out->memory = of->store.limit * SIM_FRAME;
        out->bytes_peak = of->store.peak * SIM_FRAME;
        out->pool_used = of->default_pool->used;
        out->pool_reserved = of->default_pool->used + of->default_pool->cached;
        out->live.bytes = of->store.used * SIM_FRAME;
        out->live.pending = sim_pending(device);
        out->live.modules = sim_modules;
        out->live.reservations = sim_reservations;
        out->live.reserved_bytes = sim_reserved_bytes;
        out->live.host_allocations = sim_host_allocations;
        out->live.host_bytes = sim_host_bytes;
        out->host_bytes_peak = sim_host_bytes_peak;
    }
    sim_unlock();
    return exists ? 0 : -1;
}

int simcuda_reset_peak(int device)
{
    sim_lock();
    bool exists = sim_device_exists(device);
    if (exists)
        sim_devices[device].store.peak = sim_devices[device].store.used;
    sim_unlock();
    return exists ? 0 : -1;
}

int simcuda_set_memory(int device, size_t bytes)
{
    sim_lock();
    bool possible = sim_device_exists(device) && bytes / SIM_FRAME <= sim_devices[device].store.total;
    if (possible)
        sim_devices[device].store.limit = bytes / SIM_FRAME;
    sim_unlock();
    return possible ? 0 : -1;
}

void simcuda_forget_fault(void)
{
    sim_lock();
    sim_fault = CUDA_SUCCESS;
    sim_unlock();
}
