#include "images.h"

#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#ifndef EM_CUDA
#define EM_CUDA 190
#endif

/* nvcc's fatbin, as its output shows: a header, then members, each with a header of its own. */
enum { FATBIN_MAGIC = 0xBA55ED50, WRAPPER_MAGIC = 0x466243B1 };
enum { MEMBER_PTX = 1, MEMBER_ELF = 2 };
enum { MEMBER_COMPRESSED = 0x2000 | 0x8000 }; /* LZ4, Zstandard */

typedef struct fatbin {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size; /* of the members */
} fatbin;

typedef struct wrapper { /* section .nvFatBinSegment; what __cudaRegisterFatBinary gets */
    uint32_t magic, version;
    const void *data;
    void *unused;
} wrapper;

typedef struct member {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size; /* of the payload, padding included */
    uint32_t compressed_size, options_offset;
    uint16_t minor, major;
    uint32_t architecture; /* 75, 80, 90, … */
    uint32_t name_offset, name_size;
    uint64_t flags, reserved, decompressed_size;
} member;

static size_t elf_size(const char *bytes)
{
    Elf64_Ehdr header;

    memcpy(&header, bytes, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_CUDA ||
        header.e_shentsize != sizeof(Elf64_Shdr))
        return 0;
    size_t end = header.e_shoff + (size_t)header.e_shnum * sizeof(Elf64_Shdr);
    size_t programs = header.e_phoff + (size_t)header.e_phnum * header.e_phentsize;
    if (programs > end)
        end = programs;
    for (size_t i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr section;
        memcpy(&section, bytes + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_type != SHT_NOBITS && section.sh_offset + section.sh_size > end)
            end = section.sh_offset + section.sh_size;
    }
    return end;
}

/* The architecture a cubin was made for, 0 where it does not say. Its place in e_flags moved with CUDA 13's
 * assembler (ABI version 8). */
static int elf_architecture(const char *bytes)
{
    Elf64_Ehdr header;

    memcpy(&header, bytes, sizeof header);
    return (int)(header.e_ident[EI_ABIVERSION] >= 8 ? header.e_flags >> 8 & 0xFF : header.e_flags & 0xFF);
}

/* Machine code runs on devices of its major version and no smaller minor; PTX on all newer ones. */
static bool code_fits(int architecture, int cc)
{
    return architecture / 10 == cc / 10 && architecture <= cc;
}

static CUresult keep(const char *bytes, size_t size, sim_image_format format, sim_image *out)
{
    char *copy = malloc(size + 1);

    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(copy, bytes, size);
    copy[size] = '\0';
    *out = (sim_image){.format = format, .bytes = copy, .size = size};
    return CUDA_SUCCESS;
}

static CUresult open_single(const char *bytes, int cc, sim_image *out)
{
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0) {
        size_t size = elf_size(bytes);
        if (!size)
            return CUDA_ERROR_INVALID_IMAGE;
        int architecture = elf_architecture(bytes);
        if (architecture && !code_fits(architecture, cc))
            return CUDA_ERROR_NO_BINARY_FOR_GPU;
        return keep(bytes, size, SIM_IMAGE_ELF, out);
    }
    /* PTX begins with comments or white space, then .version. Binary garbage has neither. */
    if (!isspace((unsigned char)bytes[0]) && strncmp(bytes, "//", 2) != 0 && strncmp(bytes, "/*", 2) != 0 &&
        bytes[0] != '.')
        return CUDA_ERROR_INVALID_IMAGE;
    if (!strstr(bytes, ".version"))
        return CUDA_ERROR_INVALID_PTX;
    return keep(bytes, strlen(bytes), SIM_IMAGE_PTX, out);
}

static bool member_fits(const member *of, int cc)
{
    int architecture = (int)of->architecture;

    if (of->kind == MEMBER_PTX)
        return architecture <= cc;
    return of->kind == MEMBER_ELF && code_fits(architecture, cc);
}

/* The member that a device would run, and its header; NULL where none fits, or `damaged`. */
static const char *choose(const char *bytes, int cc, member *out, bool *damaged)
{
    fatbin header;
    const char *best = NULL;
    member chosen = {.kind = 0}, at;

    *damaged = false;
    memcpy(&header, bytes, sizeof header);
    for (uint64_t offset = 0; offset + sizeof at <= header.size; offset += at.header_size + at.size) {
        const char *start = bytes + header.header_size + offset;
        memcpy(&at, start, sizeof at);
        if (at.header_size < sizeof at || at.size > header.size) {
            *damaged = true;
            return NULL;
        }
        /* Machine code before PTX, then the newest. */
        bool better = at.kind != chosen.kind ? at.kind > chosen.kind : at.architecture > chosen.architecture;
        if (member_fits(&at, cc) && better) {
            chosen = at;
            best = start + at.header_size;
        }
    }
    *out = chosen;
    return best;
}

static CUresult open_fatbin(const char *bytes, int cc, sim_image *out)
{
    bool damaged;
    member chosen;
    const char *best = choose(bytes, cc, &chosen, &damaged);

    if (!best)
        return damaged ? CUDA_ERROR_INVALID_IMAGE : CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (chosen.flags & MEMBER_COMPRESSED) {
        *out = (sim_image){.format = SIM_IMAGE_OPAQUE};
        return CUDA_SUCCESS;
    }
    return keep(best, chosen.size, chosen.kind == MEMBER_ELF ? SIM_IMAGE_ELF : SIM_IMAGE_PTX, out);
}

/* What a wrapper is around, and the first four bytes of it; an image without one is itself. */
static const void *unwrapped(const void *image, uint32_t *magic)
{
    memcpy(magic, image, sizeof *magic);
    if (*magic == (uint32_t)WRAPPER_MAGIC) {
        wrapper around;
        memcpy(&around, image, sizeof around);
        image = around.data;
        memcpy(magic, image, sizeof *magic);
    }
    return image;
}

CUresult sim_image_open(const void *image, int cc, sim_image *out)
{
    uint32_t magic;

    image = unwrapped(image, &magic);
    if (magic == (uint32_t)FATBIN_MAGIC)
        return open_fatbin(image, cc, out);
    return open_single(image, cc, out);
}

int sim_image_architecture(const void *image, int cc)
{
    uint32_t magic;
    bool damaged;
    member chosen;

    image = unwrapped(image, &magic);
    if (magic != (uint32_t)FATBIN_MAGIC)
        return -1;
    return choose(image, cc, &chosen, &damaged) ? (int)chosen.architecture : 0;
}

void sim_image_close(sim_image *image)
{
    free(image->bytes);
    image->bytes = NULL;
}

/* The symbol of that name and type in an ELF image, or false. */
static bool elf_symbol(const sim_image *image, const char *name, unsigned type, Elf64_Sym *out)
{
    Elf64_Ehdr header;

    memcpy(&header, image->bytes, sizeof header);
    for (size_t i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr table, strings;
        memcpy(&table, image->bytes + header.e_shoff + i * sizeof table, sizeof table);
        if (table.sh_type != SHT_SYMTAB || table.sh_link >= header.e_shnum)
            continue;
        memcpy(&strings, image->bytes + header.e_shoff + table.sh_link * sizeof strings, sizeof strings);
        for (size_t at = 0; at + sizeof *out <= table.sh_size; at += sizeof *out) {
            memcpy(out, image->bytes + table.sh_offset + at, sizeof *out);
            if (ELF64_ST_TYPE(out->st_info) == type && out->st_shndx != SHN_UNDEF &&
                out->st_name < strings.sh_size &&
                strcmp(image->bytes + strings.sh_offset + out->st_name, name) == 0)
                return true;
        }
    }
    return false;
}

static bool word_character(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$';
}

/* Is there ".entry NAME" in the text? */
static bool ptx_entry(const char *text, const char *name)
{
    size_t length = strlen(name);

    for (const char *at = text; (at = strstr(at, ".entry"));) {
        at += strlen(".entry");
        while (isspace((unsigned char)*at))
            at++;
        if (strncmp(at, name, length) == 0 && !word_character(at[length]))
            return true;
    }
    return false;
}

bool sim_image_has_kernel(const sim_image *image, const char *name)
{
    Elf64_Sym symbol;

    switch (image->format) {
    case SIM_IMAGE_ELF:
        return elf_symbol(image, name, STT_FUNC, &symbol);
    case SIM_IMAGE_PTX:
        return ptx_entry(image->bytes, name);
    default:
        return true;
    }
}

size_t sim_image_global(const sim_image *image, const char *name)
{
    Elf64_Sym symbol;

    return image->format == SIM_IMAGE_ELF && elf_symbol(image, name, STT_OBJECT, &symbol) ? symbol.st_size
                                                                                          : 0;
}
