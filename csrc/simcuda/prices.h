/* What things cost on the virtual clock (clock.h), in nanoseconds. A function costs the host what the first row that
 * fits its name says; simcuda_price changes one function's, or one of the device's rows.
 *
 * Sources, of figures for one call on 2 MiB where the size matters; larger pieces are not dearer here:
 *   [vA]  Prabhu et al., vAttention (ASPLOS 2025), the table of latencies of CUDA's VMM calls, on an A100
 *   [GM]  Guo et al., GMLake (ASPLOS 2024), table 1: 2 GiB in chunks of 2 MiB cost 115 times a cudaMalloc of 2 GiB; with
 *         [vA]'s 29 + 2 + 38 us a chunk that makes 0.6 ms a cudaMalloc
 *   [A100] NVIDIA's data sheet of the A100 40 GB, which the default settings resemble: 1555 GB/s; PCIe 4.0 x16, of whose
 *         32 GB/s a copy gets about 25
 *   [est] an estimate: the order of magnitude that is commonly measured, from no publication */
#ifndef SIM_PRICES_H
#define SIM_PRICES_H

/* clang-format off */
#define SIM_HOST_PRICES(X)                                                                                   \
    X("cuMemCreate",          29000) /* [vA] */                                                              \
    X("cuMemMap",              2000) /* [vA] */                                                              \
    X("cuMemSetAccess",       38000) /* [vA] */                                                              \
    X("cuMemUnmap",           34000) /* [vA] */                                                              \
    X("cuMemRelease",         23000) /* [vA] */                                                              \
    X("cuMemAddress*",         2000) /* [vA] 1 to 2 us */                                                    \
    X("cudaMalloc",          600000) /* [GM] */                                                              \
    X("cuMemAlloc_v2",       600000) /* [GM] */                                                              \
    X("cudaFree",            600000) /* [est] as much as it took; the device is waited for besides */        \
    X("cuMemFree_v2",        600000) /* [est] likewise */                                                    \
    X("cu*Launch*",            2500) /* [est] a kernel, a graph, a host function */                          \
    X("cu*Memcpy*",            2500) /* [est] queued like a launch */                                        \
    X("cu*Memset*",            2500) /* [est] likewise */                                                    \
    X("cu*Event*",             1000) /* [est] record, query, wait, create */                                 \
    X("cu*Synchronize",        1000) /* [est] beside what is waited for */                                   \
    X("*",                      100) /* [est] what reads or changes the caller's own state */

#define SIM_DEVICE_PRICES(X)                                                                                 \
    X("kernel",                5000) /* a launch, whatever it computes: its bytes are not known. [est] */     \
    X("device GiB",          690500) /* a GiB read or written by a copy or memset: 2^30 / 1555 GB/s. [A100] */ \
    X("link GiB",          42950000) /* a GiB between host and device: 2^30 / 25 GB/s. [A100] */
/* clang-format on */

#endif
