"""CudaPool's memory under each allocator, and on the CPU."""
