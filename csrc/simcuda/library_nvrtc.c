/* NVRTC: every program compiles, to a text that only names its kernels.
 *
 * The text is PTX in form: one empty entry for each name expression and for each `__global__ void NAME(` of
 * the source, which is what the simulated driver needs to find the function; a launch of it does nothing
 * unless a host body was registered under its name. A lowered name is the expression itself where that is an
 * identifier already.
 */
#include "csrc/simcuda/library.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* nvrtcResult, as NVIDIA documents it. */
enum {
    NVRTC_SUCCESS = 0,
    NVRTC_OUT_OF_MEMORY = 1,
    NVRTC_INVALID_INPUT = 3,
    NVRTC_INVALID_PROGRAM = 4,
    NVRTC_EXPRESSION_NOT_VALID = 10
};

struct expression {
    struct expression *next;
    char *text, *lowered;
};

struct program {
    char *source, *ptx;
    struct expression *expressions;
};

const char *nvrtcGetErrorString(int result)
{
    return result == NVRTC_SUCCESS ? "NVRTC_SUCCESS" : "simulated NVRTC: error";
}

int nvrtcVersion(int *major, int *minor)
{
    if (major == NULL || minor == NULL)
        return NVRTC_INVALID_INPUT;
    *major = SIM_CUDA_MAJOR;
    *minor = 0;
    return NVRTC_SUCCESS;
}

/* The architectures of which torch 2.13 has code; memopt chooses one of them to compile for. */
static const int architectures[] = {75, 80, 86, 89, 90, 100, 120};

int nvrtcGetNumSupportedArchs(int *count)
{
    if (count == NULL)
        return NVRTC_INVALID_INPUT;
    *count = (int)(sizeof architectures / sizeof *architectures);
    return NVRTC_SUCCESS;
}

int nvrtcGetSupportedArchs(int *out)
{
    if (out == NULL)
        return NVRTC_INVALID_INPUT;
    memcpy(out, architectures, sizeof architectures);
    return NVRTC_SUCCESS;
}

int nvrtcCreateProgram(struct program **out, const char *source, const char *name, int headers,
                       const char *const *header_texts, const char *const *header_names)
{
    if (out == NULL || source == NULL)
        return NVRTC_INVALID_INPUT;
    struct program *program = calloc(1, sizeof *program);
    if (program != NULL)
        program->source = strdup(source);
    if (program == NULL || program->source == NULL) {
        free(program);
        return NVRTC_OUT_OF_MEMORY;
    }
    *out = program;
    return NVRTC_SUCCESS;
}

int nvrtcDestroyProgram(struct program **at)
{
    if (at == NULL || *at == NULL)
        return NVRTC_INVALID_PROGRAM;
    struct program *program = *at;
    for (struct expression *each = program->expressions; each != NULL;) {
        struct expression *next = each->next;
        free(each->text);
        free(each->lowered);
        free(each);
        each = next;
    }
    free(program->ptx);
    free(program->source);
    free(program);
    *at = NULL;
    return NVRTC_SUCCESS;
}

static bool is_identifier(const char *text)
{
    for (const char *at = text; *at != '\0'; at++)
        if (!isalnum((unsigned char)*at) && *at != '_')
            return false;
    return *text != '\0';
}

int nvrtcAddNameExpression(struct program *program, const char *text)
{
    if (program == NULL || text == NULL)
        return program == NULL ? NVRTC_INVALID_PROGRAM : NVRTC_INVALID_INPUT;
    struct expression *each = calloc(1, sizeof *each);
    if (each == NULL)
        return NVRTC_OUT_OF_MEMORY;
    each->text = strdup(text);
    if (is_identifier(text))
        each->lowered = strdup(text);
    else if (asprintf(&each->lowered, "_Zsim%zx", (size_t)(uintptr_t)each) < 0)
        each->lowered = NULL;
    each->next = program->expressions;
    program->expressions = each; /* freed with the program, complete or not */
    return each->text == NULL || each->lowered == NULL ? NVRTC_OUT_OF_MEMORY : NVRTC_SUCCESS;
}

int nvrtcGetLoweredName(struct program *program, const char *text, const char **lowered)
{
    if (program == NULL || text == NULL || lowered == NULL)
        return program == NULL ? NVRTC_INVALID_PROGRAM : NVRTC_INVALID_INPUT;
    for (struct expression *each = program->expressions; each != NULL; each = each->next)
        if (strcmp(each->text, text) == 0) {
            *lowered = each->lowered;
            return NVRTC_SUCCESS;
        }
    return NVRTC_EXPRESSION_NOT_VALID;
}

static void write_entry(FILE *out, const char *name, size_t length)
{
    fprintf(out, ".visible .entry %.*s() { ret; }\n", (int)length, name);
}

/* The identifier before the first '(' behind each `__global__`, attributes in parentheses skipped. */
static void write_kernels(FILE *out, const char *source)
{
    for (const char *at = source; (at = strstr(at, "__global__")) != NULL;) {
        at += strlen("__global__");
        const char *open = strchr(at, '(');
        while (open != NULL && open - at >= 17 && strncmp(open - 17, "__launch_bounds__", 17) == 0)
            open = strchr(open + 1, '(');
        if (open == NULL)
            return;
        const char *end = open;
        while (end > at && isspace((unsigned char)end[-1]))
            end--;
        const char *begin = end;
        while (begin > at && (isalnum((unsigned char)begin[-1]) || begin[-1] == '_'))
            begin--;
        if (begin < end)
            write_entry(out, begin, (size_t)(end - begin));
        at = open;
    }
}

int nvrtcCompileProgram(struct program *program, int options, const char *const *option)
{
    if (program == NULL)
        return NVRTC_INVALID_PROGRAM;
    char *ptx = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&ptx, &size);
    if (out == NULL)
        return NVRTC_OUT_OF_MEMORY;
    fputs("// simulated NVRTC\n.version 8.0\n.target sm_80\n.address_size 64\n", out);
    for (struct expression *each = program->expressions; each != NULL; each = each->next)
        write_entry(out, each->lowered, strlen(each->lowered));
    write_kernels(out, program->source);
    if (fclose(out) != 0) {
        free(ptx);
        return NVRTC_OUT_OF_MEMORY;
    }
    free(program->ptx);
    program->ptx = ptx;
    return NVRTC_SUCCESS;
}

static int text_size(const struct program *program, const char *text, size_t *size)
{
    if (program == NULL || text == NULL)
        return NVRTC_INVALID_PROGRAM;
    if (size == NULL)
        return NVRTC_INVALID_INPUT;
    *size = strlen(text) + 1;
    return NVRTC_SUCCESS;
}

static int text_copy(const struct program *program, const char *text, char *out)
{
    if (program == NULL || text == NULL)
        return NVRTC_INVALID_PROGRAM;
    if (out == NULL)
        return NVRTC_INVALID_INPUT;
    strcpy(out, text); /* the caller asked for the size first, as NVRTC requires */
    return NVRTC_SUCCESS;
}

int nvrtcGetPTXSize(struct program *program, size_t *size)
{
    return text_size(program, program == NULL ? NULL : program->ptx, size);
}

int nvrtcGetPTX(struct program *program, char *out)
{
    return text_copy(program, program == NULL ? NULL : program->ptx, out);
}

/* A "cubin" is the same text: the simulated driver looks for names in either. */
int nvrtcGetCUBINSize(struct program *program, size_t *size)
{
    return nvrtcGetPTXSize(program, size);
}

int nvrtcGetCUBIN(struct program *program, char *out)
{
    return nvrtcGetPTX(program, out);
}

int nvrtcGetProgramLogSize(struct program *program, size_t *size)
{
    return text_size(program, "", size);
}

int nvrtcGetProgramLog(struct program *program, char *out)
{
    return text_copy(program, "", out);
}
