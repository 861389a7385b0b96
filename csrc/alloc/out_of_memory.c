#include "alloc/out_of_memory.h"

#include <stdarg.h>
#include <stdio.h>

const char *mo_torch_size(size_t bytes, char out[MO_TORCH_SIZE_TEXT])
{
    /* Up to and including a whole unit torch stays with the smaller one: 1 GiB is 1024.00 MiB. */
    if (bytes <= 1024)
        snprintf(out, MO_TORCH_SIZE_TEXT, "%zu bytes", bytes);
    else if (bytes <= 1u << 20)
        snprintf(out, MO_TORCH_SIZE_TEXT, "%.2f KiB", (double)bytes / 1024.0);
    else if (bytes <= 1u << 30)
        snprintf(out, MO_TORCH_SIZE_TEXT, "%.2f MiB", (double)bytes / 1048576.0);
    else
        snprintf(out, MO_TORCH_SIZE_TEXT, "%.2f GiB", (double)bytes / 1073741824.0);
    return out;
}

typedef struct writer {
    char *at;
    size_t left; /* > 0: room for the end of the string is never given away */
} writer;

static void say(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(writer *w, const char *format, ...)
{
    va_list arguments;
    int n;

    va_start(arguments, format);
    n = vsnprintf(w->at, w->left, format, arguments);
    va_end(arguments);
    if (n < 0)
        return;
    size_t written = (size_t)n < w->left ? (size_t)n : w->left - 1;
    w->at += written;
    w->left -= written;
}

/* Several sizes in one sentence, each in a buffer of its own. */
#define SIZE(bytes) mo_torch_size((bytes), (char[MO_TORCH_SIZE_TEXT]){0})

static size_t less(size_t a, size_t b)
{
    return a > b ? a - b : 0;
}

static void say_what_is_held(writer *w, const mo_out_of_memory *f)
{
    const size_t others = less(f->total_bytes, f->free_bytes + f->held);

    if (f->budget)
        say(w, " %s allowed.", SIZE(f->budget));
    say(w, " memopt holds %s: %s in live tensors (%s requested) and %s free, of which the largest run is %s",
        SIZE(f->held), SIZE(f->live), SIZE(f->requested), SIZE(less(f->held, f->live)),
        SIZE(f->largest_free));
    if (f->largest_allocatable > f->largest_free)
        say(w, ", or %s after moving memory together", SIZE(f->largest_allocatable));
    say(w, " (fragmentation: external %.1f%%, internal %.1f%%).", 100 * f->external, 100 * f->internal);
    if (f->total_bytes && others)
        say(w, " %s of the device is held by the CUDA context, libraries and other processes.", SIZE(others));
}

/* Torch's users know a stream by the number of torch.cuda.Stream.cuda_stream. */
static void say_what_is_pending(writer *w, const mo_out_of_memory *f)
{
    size_t shown = f->pending_streams < MO_PENDING_SHOWN ? f->pending_streams : MO_PENDING_SHOWN;

    if (!f->pending_bytes)
        return;
    say(w, " %s is freed but may still be used by queued work", SIZE(f->pending_bytes));
    for (size_t i = 0; i < shown; i++)
        say(w, "%s %s on stream %#zx", i ? "," : ":", SIZE(f->pending[i].bytes),
            (size_t)f->pending[i].stream);
    say(w, ".");
}

/* One piece of advice: the first whose reason holds. */
static void say_what_helps(writer *w, const mo_out_of_memory *f)
{
    const size_t unused = less(f->held, f->live);
    const size_t room = f->budget ? less(f->budget, f->held) : f->free_bytes;

    say(w, " What would help: ");
    if (f->total_bytes && f->wanted > f->total_bytes)
        say(w, "a smaller tensor, since this one is larger than the device.");
    else if (f->budget && f->wanted > f->budget)
        say(w, "a larger memory_budget or memory fraction, since this tensor alone exceeds it.");
    else if (f->budget && room < f->free_bytes && f->wanted <= f->free_bytes + unused)
        say(w, "a larger memory_budget or memory fraction: the device has %s free.", SIZE(f->free_bytes));
    else if (f->wanted <= f->largest_allocatable + f->pending_bytes)
        say(w, "waiting for that work (torch.cuda.synchronize()) before requesting this much.");
    else if (f->wanted <= unused + room)
        say(w, "contiguous free memory: the free memory lies between live tensors, or is kept by captured "
               "graphs and pools. Free some of these, or use a smaller batch.");
    else
        say(w, "using %s less: a smaller batch, activation checkpointing, or lower precision.",
            SIZE(less(f->wanted, f->largest_allocatable)));
}

void mo_out_of_memory_text(char *text, size_t capacity, const mo_out_of_memory *facts)
{
    writer w = {text, capacity};

    *text = '\0';
    say(&w, "CUDA out of memory. Tried to allocate %s. GPU %d", SIZE(facts->wanted), facts->device);
    if (facts->total_bytes)
        say(&w, " has a total capacity of %s of which %s is free.", SIZE(facts->total_bytes),
            SIZE(facts->free_bytes));
    else
        say(&w, " did not report its capacity.");
    say_what_is_held(&w, facts);
    say_what_is_pending(&w, facts);
    if (facts->stale_bytes)
        say(&w, " %s of addresses are still to be unmapped.", SIZE(facts->stale_bytes));
    say_what_helps(&w, facts);
}
