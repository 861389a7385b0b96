/* Kernels by the driver API: images, functions, launches, and host bodies with their arguments. */
#include "device.h"

#include <elf.h>

static const char ptx[] =
    "//\n// text\n.version 8.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry add_one(\n .param .u64 p\n)\n{ ret; }\n.visible .entry other() { ret; }\n";

/* A cubin with nothing in it but names: header, three sections, a function and a variable. */
typedef struct cubin {
    Elf64_Ehdr header;
    Elf64_Shdr section[3];
    Elf64_Sym symbol[3];
    char strings[64];
} cubin;

static cubin make_cubin(void)
{
    cubin made = {.strings = "\0add_one\0counter"};

    memcpy(made.header.e_ident, ELFMAG, SELFMAG);
    made.header.e_ident[EI_CLASS] = ELFCLASS64;
    made.header.e_machine = 190;
    made.header.e_shoff = offsetof(cubin, section);
    made.header.e_shentsize = sizeof(Elf64_Shdr);
    made.header.e_shnum = 3;
    made.section[1] = (Elf64_Shdr){.sh_type = SHT_SYMTAB,
                                   .sh_link = 2,
                                   .sh_offset = offsetof(cubin, symbol),
                                   .sh_size = sizeof made.symbol};
    made.section[2] = (Elf64_Shdr){
        .sh_type = SHT_STRTAB, .sh_offset = offsetof(cubin, strings), .sh_size = sizeof made.strings};
    made.symbol[1] = (Elf64_Sym){.st_name = 1, .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC), .st_shndx = 1};
    made.symbol[2] = (Elf64_Sym){
        .st_name = 9, .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_OBJECT), .st_shndx = 1, .st_size = 24};
    return made;
}

/* A fatbin of one uncompressed member. */
typedef struct one_member {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
    uint16_t kind, member_version;
    uint32_t member_header_size;
    uint64_t payload_size;
    uint32_t compressed_size, options;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_size;
    uint64_t flags, reserved, decompressed_size;
    cubin payload;
} one_member;

static one_member make_fatbin(uint16_t kind, uint32_t architecture, uint64_t flags)
{
    return (one_member){.magic = 0xBA55ED50,
                        .version = 1,
                        .header_size = 16,
                        .size = sizeof(one_member) - 16,
                        .kind = kind,
                        .member_header_size = offsetof(one_member, payload) - 16,
                        .payload_size = sizeof(cubin),
                        .architecture = architecture,
                        .flags = flags,
                        .payload = make_cubin()};
}

static CUfunction function_in(CUmodule module, const char *name)
{
    CUfunction function;

    OK(cuModuleGetFunction(&function, module, name));
    return function;
}

TEST(ptx_and_cubins_load_and_know_their_names)
{
    open_device();
    simcuda_live before = live_now();
    cubin elf = make_cubin();
    const void *images[] = {ptx, &elf};

    for (int i = 0; i < 2; i++) {
        CUmodule module;
        CUfunction function, again;
        const char *name;

        OK(cuModuleLoadData(&module, images[i]));
        OK(cuModuleGetFunction(&function, module, "add_one"));
        OK(cuModuleGetFunction(&again, module, "add_one"));
        CHECK(function == again);
        OK(cuFuncGetName(&name, function));
        CHECK_STR(name, "add_one");
        IS(cuModuleGetFunction(&function, module, "add_on"), NOT_FOUND);
        IS(cuModuleGetFunction(&function, module, "add_one_more"), NOT_FOUND);
        IS(cuModuleGetFunction(&function, module, "counter"), NOT_FOUND);
        IS(cuModuleGetFunction(NULL, module, "add_one"), INVALID_VALUE);
        IS(cuModuleGetFunction(&function, module, NULL), INVALID_VALUE);
        OK(cuModuleUnload(module));
        IS(cuModuleUnload(module), INVALID_HANDLE);
        IS(cuModuleGetFunction(&function, module, "add_one"), INVALID_HANDLE);
        IS(cuFuncGetName(&name, again), INVALID_HANDLE); /* functions go with their module */
    }
    CHECK_LIVE(before);
}

TEST(fatbins_are_searched_for_what_fits_the_device)
{
    open_device(); /* compute capability 8.0 */
    simcuda_live before = live_now();
    CUmodule module;
    CUfunction function;
    one_member fits = make_fatbin(2, 80, 0), newer_minor = make_fatbin(2, 86, 0),
               other_major = make_fatbin(2, 75, 0);
    one_member newer_ptx = make_fatbin(1, 90, 0), compressed = make_fatbin(2, 80, 0x2000);
    struct {
        uint32_t magic, version;
        const void *data;
        void *unused;
    } wrapper = {0x466243B1, 1, &fits, NULL};

    OK(cuModuleLoadData(&module, &fits));
    OK(cuModuleGetFunction(&function, module, "add_one"));
    IS(cuModuleGetFunction(&function, module, "missing"), NOT_FOUND);
    OK(cuModuleUnload(module));
    OK(cuModuleLoadData(&module, &wrapper));
    OK(cuModuleUnload(module));
    OK(cuModuleLoadData(&module, &compressed)); /* can't be looked into: any name is there */
    OK(cuModuleGetFunction(&function, module, "anything"));
    OK(cuModuleUnload(module));
    IS(cuModuleLoadData(&module, &newer_minor), NO_BINARY_FOR_GPU);
    IS(cuModuleLoadData(&module, &other_major), NO_BINARY_FOR_GPU);
    IS(cuModuleLoadData(&module, &newer_ptx), NO_BINARY_FOR_GPU);
    CHECK_LIVE(before);
}

TEST(a_cubin_for_another_architecture_is_refused)
{
    open_device();
    CUmodule module;
    cubin elf = make_cubin();

    elf.header.e_flags = 80; /* until CUDA 12 */
    OK(cuModuleLoadData(&module, &elf));
    OK(cuModuleUnload(module));
    elf.header.e_flags = 90;
    IS(cuModuleLoadData(&module, &elf), NO_BINARY_FOR_GPU);
    elf.header.e_ident[EI_ABIVERSION] = 8;
    elf.header.e_flags = 0x6005004;
    OK(cuModuleLoadData(&module, &elf));
    OK(cuModuleUnload(module));
    elf.header.e_flags = 0x6005604;
    IS(cuModuleLoadData(&module, &elf), NO_BINARY_FOR_GPU);
}

TEST(images_that_are_none_are_refused)
{
    open_device();
    simcuda_live before = live_now();
    CUmodule module;
    CUlibrary library;
    cubin x86 = make_cubin();
    x86.header.e_machine = EM_X86_64;

    IS(cuModuleLoadData(&module, "hello"), INVALID_IMAGE);
    IS(cuModuleLoadData(&module, "\x01\x02\x03\x04"), INVALID_IMAGE);
    IS(cuModuleLoadData(&module, "// nothing but a comment\n"), INVALID_PTX);
    IS(cuModuleLoadData(&module, &x86), INVALID_IMAGE);
    IS(cuModuleLoadData(&module, NULL), INVALID_VALUE);
    IS(cuModuleLoadData(NULL, ptx), INVALID_VALUE);
    IS(cuModuleLoadDataEx(&module, ptx, 1, NULL, NULL), INVALID_VALUE);
    IS(cuModuleLoad(&module, "/nonexistent/kernel.cubin"), FILE_NOT_FOUND);
    IS(cuLibraryLoadData(&library, "hello", NULL, NULL, 0, NULL, NULL, 0), INVALID_IMAGE);
    CHECK_LIVE(before);
}

TEST(globals_have_memory_of_the_device)
{
    open_device();
    simcuda_live before = live_now();
    cubin elf = make_cubin();
    CUmodule module;
    CUdeviceptr address, again;
    size_t size;
    char bytes[24];

    OK(cuModuleLoadData(&module, &elf));
    OK(cuModuleGetGlobal_v2(&address, &size, module, "counter"));
    CHECK_EQ(size, 24);
    OK(cuMemcpyDtoH_v2(bytes, address, 24));
    CHECK(bytes[0] == 0 && bytes[23] == 0);
    OK(cuModuleGetGlobal_v2(&again, NULL, module, "counter"));
    CHECK_EQ(address, again);
    IS(cuModuleGetGlobal_v2(&address, &size, module, "add_one"), NOT_FOUND);
    OK(cuModuleUnload(module));
    CHECK_LIVE(before);
}

TEST(libraries_give_kernels_that_launch)
{
    open_device();
    simcuda_live before = live_now();
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    CUmodule module;
    uint64_t launches = counts_now(0).launches;

    OK(cuLibraryLoadData(&library, ptx, NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&kernel, library, "add_one"));
    IS(cuLibraryGetKernel(&kernel, library, "missing"), NOT_FOUND);
    OK(cuKernelGetFunction(&function, kernel));
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    OK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    CHECK_EQ(counts_now(0).launches, launches + 2);
    IS(cuModuleUnload((CUmodule)library), INVALID_HANDLE); /* a library is no module */
    OK(cuModuleLoadData(&module, ptx));
    IS(cuLibraryUnload((CUlibrary)module), INVALID_HANDLE);
    OK(cuModuleUnload(module));
    OK(cuLibraryUnload(library));
    IS(cuLibraryUnload(library), INVALID_HANDLE);
    IS(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), INVALID_HANDLE);
    CHECK_LIVE(before);
}

/* ---- host bodies -------------------------------------------------------------------------------------- */
typedef struct seen {
    unsigned grid[3], block[3];
    char small;
    double number;
    int *counter;
} seen;

static seen last;

static void add_one(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    memcpy(last.grid, grid, sizeof last.grid);
    memcpy(last.block, block, sizeof last.block);
    last.small = *(char *)arguments[0];
    last.number = *(double *)arguments[1];
    last.counter = *(int **)arguments[2];
    *last.counter += 1;
}

static const size_t add_one_sizes[] = {sizeof(char), sizeof(double), sizeof(int *)};

TEST(a_host_body_gets_its_arguments_as_they_were_at_the_launch)
{
    open_device();
    CUmodule module;
    CUdeviceptr counter;
    CUstream stream;
    char small = 5;
    double number = 2.5;

    OK(cuModuleLoadData(&module, ptx));
    CUfunction function = function_in(module, "add_one");
    CHECK_EQ(simcuda_emulate("add_one", add_one, 3, add_one_sizes), 0); /* after the module was loaded */
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&counter, 512));
    OK(cuMemsetD32_v2(counter, 10, 1));
    memset(&last, 0, sizeof last);
    simcuda_set_lazy(1);
    OK(cuLaunchKernel(function, 2, 3, 4, 5, 6, 7, 0, stream, (void *[]){&small, &number, &counter}, NULL));
    small = 0;
    number = 0;
    CHECK(last.counter == NULL);
    OK(cuStreamSynchronize(stream));
    CHECK(last.small == 5 && last.number == 2.5 && *(int *)counter == 11);
    CHECK(last.grid[0] == 2 && last.grid[2] == 4 && last.block[0] == 5 && last.block[2] == 7);

    /* The same by a packed buffer: char at 0, double at 8, pointer at 16. */
    struct {
        char small;
        double number;
        CUdeviceptr counter;
    } packed = {7, 1.5, counter};
    size_t size = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra));
    OK(cuStreamSynchronize(stream));
    CHECK(last.small == 7 && last.number == 1.5 && *(int *)counter == 12);
    size = 16; /* too small for the third */
    IS(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra), INVALID_VALUE);
    IS(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&small, &number, &counter}, extra),
       INVALID_VALUE); /* both ways at once */
    IS(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), INVALID_VALUE);
    OK(cuMemFree_v2(counter));
    OK(cuStreamDestroy_v2(stream));
    OK(cuModuleUnload(module));
}

TEST(a_host_body_runs_again_at_each_replay_of_a_graph)
{
    open_device();
    CUmodule module;
    CUdeviceptr counter;
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    char small = 1;
    double number = 2;

    CHECK_EQ(simcuda_emulate("add_one", add_one, 3, add_one_sizes), 0);
    OK(cuModuleLoadData(&module, ptx));
    CUfunction function = function_in(module, "add_one");
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&counter, 512));
    OK(cuMemsetD32_v2(counter, 0, 1));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&small, &number, &counter}, NULL));
    CUlaunchConfig config = {.gridDimX = 1,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = 8,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .hStream = stream};
    OK(cuLaunchKernelEx(&config, function, (void *[]){&small, &number, &counter}, NULL));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK_EQ(*(int *)counter, 0);
    for (int i = 1; i <= 3; i++) {
        OK(cuGraphLaunch(exec, stream));
        OK(cuStreamSynchronize(stream));
        CHECK_EQ(*(int *)counter, 2 * i);
    }
    CHECK_EQ(last.block[0], 8);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree_v2(counter));
    OK(cuStreamDestroy_v2(stream));
    OK(cuModuleUnload(module));
}

TEST(a_kernel_given_memory_its_device_may_not_touch_faults)
{
    open_device();
    CUmodule module;
    CUdeviceptr address;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc rw = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    char small = 1;
    double number = 2;

    CHECK_EQ(simcuda_emulate("add_one", add_one, 3, add_one_sizes), 0);
    OK(cuModuleLoadData(&module, ptx));
    CUfunction function = function_in(module, "add_one");
    OK(cuMemAddressReserve(&address, FRAME, 0, 0, 0));
    OK(cuMemCreate(&handle, FRAME, &properties, 0));
    OK(cuMemMap(address, FRAME, 0, handle, 0));
    void *arguments[] = {&small, &number, &address};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
    IS(cuCtxSynchronize(), ILLEGAL_ADDRESS);
    simcuda_forget_fault();
    OK(cuMemSetAccess(address, FRAME, &rw, 1));
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
    OK(cuCtxSynchronize());
    CHECK_EQ(*(int *)address, 1);
    OK(cuMemUnmap(address, FRAME));
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
    IS(cuCtxSynchronize(), ILLEGAL_ADDRESS); /* reserved, no longer mapped */
    simcuda_forget_fault();
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, FRAME));
    OK(cuModuleUnload(module));
}

TEST(impossible_configurations_are_refused)
{
    open_device();
    CUmodule module;
    CUcontext other;
    CUstream stream;

    OK(cuModuleLoadData(&module, ptx));
    CUfunction f = function_in(module, "other");
    int value;

    OK(cuLaunchKernel(f, 1, 1, 1, 1024, 1, 1, 49152, NULL, NULL, NULL));
    IS(cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 65536, 1, 1, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 65536, 1, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 1, 0, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 1, 32, 32, 2, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 1, 1, 1, 65, 0, NULL, NULL, NULL), INVALID_VALUE);
    IS(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 49153, NULL, NULL, NULL), INVALID_VALUE);
    OK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 163 * 1024));
    OK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 163 * 1024, NULL, NULL, NULL));
    IS(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 164 * 1024), INVALID_VALUE);
    IS(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_NUM_REGS, 8), INVALID_VALUE);
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f));
    CHECK_EQ(value, 1024);
    IS(cuFuncGetAttribute(NULL, CU_FUNC_ATTRIBUTE_NUM_REGS, f), INVALID_VALUE);
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, f, 256, 0));
    CHECK_EQ(value, 8);
    OK(cuLaunchCooperativeKernel(f, 108 * 8, 1, 1, 256, 1, 1, 0, NULL, NULL));
    IS(cuLaunchCooperativeKernel(f, 108 * 8 + 1, 1, 1, 256, 1, 1, 0, NULL, NULL),
       COOPERATIVE_LAUNCH_TOO_LARGE);
    IS(cuLaunchKernel((CUfunction)module, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), INVALID_HANDLE);

    OK(cuStreamCreate(&stream, 0));
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxPushCurrent_v2(other));
    IS(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), INVALID_HANDLE); /* a stream of device 0 */
    OK(cuCtxPopCurrent_v2(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    OK(cuStreamDestroy_v2(stream));
    OK(cuModuleUnload(module));
}

TEST(functions_are_found_by_name_as_cuda_names_them)
{
    open_device();
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    cuuint64_t id;
    CUstreamCaptureStatus capturing;

    OK(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status));
    CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS && function == (void *)cuMemAlloc_v2);
    OK(cuGetProcAddress_v2("cuMemCreate", &function, 12000, 0, NULL));
    CHECK(function == (void *)cuMemCreate);
    OK(cuGetProcAddress_v2("cuStreamGetCaptureInfo", &function, 12000, 0, NULL));
    CHECK(function == (void *)cuStreamGetCaptureInfo_v2);
    OK(cuGetProcAddress_v2("cuStreamGetCaptureInfo", &function, 13000, 0, NULL));
    CHECK(function == (void *)cuStreamGetCaptureInfo_v3);
    OK(cuGetProcAddress_v2("cuNoSuchThing", &function, 13000, 0, &status));
    CHECK(function == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    IS(cuGetProcAddress_v2("cuNoSuchThing", &function, 13000, 0, NULL), NOT_FOUND);
    IS(cuGetProcAddress_v2("cudaMalloc", &function, 13000, 0, NULL), NOT_FOUND);
    IS(cuGetProcAddress_v2(NULL, &function, 13000, 0, NULL), INVALID_VALUE);
    OK(cuStreamGetCaptureInfo_v2(NULL, &capturing, &id, NULL, NULL, NULL));
}

TEST_MAIN
